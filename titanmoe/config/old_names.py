"""The table of renamed and removed options.

`rename` converts the records of older runs: manifests of checkpoints, and the config.toml of a run's folder. A recipe
or a command line with an old name is refused, and `advise` says what to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from titanmoe.config.fields import toml_value


class NewName(NamedTuple):
    """The present name of a renamed option."""

    path: str
    convert: Callable[[Any], Any] = lambda value: value
    """A function that returns the new value for an old one; None if the old one equals the default."""


class Removed(NamedTuple):
    """A removed option, which is dropped from records."""

    advice: str
    """Advice for recipes that have the option, for the message."""


_NO_COPIES = (
    "a run no longer keeps copies in the memory of its hosts: leave it out, and set checkpoint.interval to as many "
    "steps as you can afford to repeat"
)

OLD_NAMES: dict[str, NewName | Removed] = {
    "checkpoint.local": Removed(_NO_COPIES),
    "checkpoint.local_folder": Removed(_NO_COPIES),
    "model.expert_biases": NewName("model.expert_linear_bias"),
    "rl.answers": NewName("rl.completions"),
    "moe.overlap_halves": NewName("moe.overlap", {True: "halves"}.get),
    "pipeline.overlap_pairs": NewName("moe.overlap", {True: "pairs"}.get),
    "validation.answers.paths": NewName("validation.quiz.paths"),
    "validation.answers.interval": NewName("validation.quiz.interval"),
    "validation.answers.delimiter": NewName("validation.quiz.delimiter"),
    "moe.overlap_chunks": NewName("moe.overlap", {-1: "auto"}.get),
}
"""Renamed and removed options by old path. Of rows with the same new path, the first value that is not None counts."""

OLD_VALUES: dict[str, dict[str, str]] = {
    "activation_checkpoint.mode": {"full_but_rows": "full_except_dispatch"},
    "rl.replay": {"true": "rollout", "false": "off"},
}
"""The new name of a choice by its old one, by the path of the option."""


def rename(config: dict[str, Any]) -> None:
    """Replace old names of options in the config of a record by the present ones, in place, unless these are set.

    Removed options are dropped. Old names of choices, and of fields that model.change lists, are replaced too.

    Args:
        config: nested tables of values, from a checkpoint's manifest or a run's config.toml.
    """
    change = _table(config, "model.change").get("change")
    if isinstance(change, list):  # it lists fields of [model] by their name alone
        change[:] = [_new_change(name) for name in change]
    for old, new in OLD_NAMES.items():
        value = _table(config, old).pop(old.rpartition(".")[2], None)
        if value is None or isinstance(new, Removed) or (value := _converted(new, value)) is None:
            continue
        _table(config, new.path, create=True).setdefault(new.path.rpartition(".")[2], value)
    for path in OLD_VALUES:
        table, name = _table(config, path), path.rpartition(".")[2]
        if present := new_value(path, table.get(name)):
            table[name] = present


def new_value(path: str, value: Any) -> str:
    """Return the present name of a choice that is given by its old one; "" if it is none.

    Args:
        path: the present path of the option.
        value: a text, or a boolean of an option that has choices by now.
    """
    text = toml_value(value) if isinstance(value, bool) else value
    return OLD_VALUES.get(path, {}).get(text, "") if isinstance(text, str) else ""


def _table(config: dict[str, Any], path: str, create: bool = False) -> dict[str, Any]:
    """Return the table that contains the option of this path; an empty one outside the config if there is none.

    Args:
        config: nested tables of values.
        create: whether missing tables are added to the config.
    """
    table: Any = config
    for name in path.split(".")[:-1]:
        table = table.setdefault(name, {}) if create else table.get(name, {})
        if not isinstance(table, dict):
            return {}
    return table


def _converted(new: NewName, value: Any) -> Any:
    try:
        return new.convert(value)
    except Exception:  # a record may hold anything: whoever reads it refuses what the new option cannot be
        return value


def _new_change(name: Any) -> Any:
    new = OLD_NAMES.get(f"model.{name}")
    return new.path.removeprefix("model.") if isinstance(new, NewName) else name


def is_old_table(path: str) -> bool:
    """Return whether options that have been renamed or removed were in the TOML table of this path."""
    return any(old.startswith(f"{path}.") for old in OLD_NAMES)


def advise(path: str, value: Any, dashes: str = "") -> str:
    """Return what to write in place of a renamed or removed option, as a message; "" if it is neither.

    Args:
        path: the path of the option, under its old name.
        value: the value that is given for it.
        dashes: "--" if it is given on a command line, "" in a recipe.
    """
    new = OLD_NAMES.get(path)
    if new is None:
        return ""
    if isinstance(new, Removed):
        return new.advice
    now = _converted(new, value)
    if now is None:
        return f"it is {dashes}{new.path} now: leave it out"
    if dashes:
        return f"it is {dashes}{new.path} {now if isinstance(now, str) else toml_value(now)} now"
    return f"it is {new.path} now: write {new.path} = {toml_value(now)}"
