"""Loading: a recipe and a command line become a Config, or a ConfigError with every problem at once.

`read_draft` merges defaults, presets of components, the published model's file, the recipe and overrides, in this
order. `Draft.finish` then checks the mapping with a function of the caller and prints --help or --print-config.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from titanmoe.config import laws, old_names, other_names
from titanmoe.config.allowed_code import allow_code, code_names
from titanmoe.config.command_line import HINTS, CommandLine, split_words
from titanmoe.config.component_kinds import ComponentError, Components
from titanmoe.config.field_values import WrongType, closest, convert, convert_words, nearest_field, shorten, value_text
from titanmoe.config.fields import Field, build, fields, flatten, help_page, own_fields, tables, to_toml, toml_value
from titanmoe.config.model_file import ModelFile, changed_paths
from titanmoe.config.recipe import Recipe, RecipeError, find_recipe, read_recipe
from titanmoe.config.schema import OWN, Config
from titanmoe.this_process import is_rank_0

_UNLISTED = re.compile(r"and (\d[\d,]*) more ")
"""Beginning of a last problem that stands for those that are not listed."""


class ConfigError(ValueError):
    """The error for a config that cannot run, with every reason in `problems` and the config's origin in `source`.

    Args:
        problems: the reasons; a text is one.
    """

    def __init__(self, problems: str | list[str], source: str = ""):
        super().__init__(problems, source)  # pickle makes the exception from these arguments
        self.problems, self.source = [problems] if isinstance(problems, str) else problems, source

    def __str__(self) -> str:
        return format_problems(self.problems, self.source)


def format_problems(problems: Sequence[str], source: str = "") -> str:
    """Return the problems as a numbered list below a line with their count and source, as error messages show them.

    A single problem without a source is one line, "error: ...". A last problem that reads "and N more ..." counts as N.
    """
    if len(problems) == 1 and not source:
        return f"error: {problems[0]}"
    unlisted = _UNLISTED.match(problems[-1]) if problems else None
    total = len(problems) - 1 + int(unlisted[1].replace(",", "")) if unlisted else len(problems)
    count = "1 problem" if total == 1 else f"{total:,} problems"
    lines = [f"error: {count} in {source}" if source else f"error: {count}", ""]
    width = len(str(len(problems)))
    for number, problem in enumerate(problems, 1):
        lines.append(f"  {number:>{width}}. {problem}".replace("\n", "\n" + " " * (width + 4)))
    return "\n".join(lines)


def exit_with(problems: Sequence[str], source: str = "") -> NoReturn:
    """Print the problems on stderr and exit with code 2, as every rank does after a user's mistake.

    Rank 0 prints at once. Another rank waits 5 seconds, in which a SIGTERM ends it silently. It prints only after them,
    because the problem is then its own, such as data that its machine lacks.

    Args:
        source: where they are, such as the recipe's file; "" if they say so themselves.
    """
    if is_rank_0():
        print(format_problems(problems, source), file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks once one has ended, and rank 0 may not have printed yet. So wait until rank 0 has
        # ended; the SIGTERM that follows ends the wait.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
        time.sleep(5)
        print(f"rank {os.environ['RANK']}: {format_problems(problems, source)}", file=sys.stderr, flush=True)
    sys.exit(2)


def load(
    argv: Sequence[str],
    components: Components,
    check: Callable[[Config], list[str]],
    resolve: Callable[[Config], Config] | None = None,
) -> Config:
    """Read a recipe and the overrides of a command line, check them, and return the config.

    With --help, or with --print-config if there are no problems, prints and exits with code 0.

    Args:
        argv: words of the command line, a recipe and overrides, such as ["debug", "--training.steps", "10"].
        check: returns messages of further problems, such as those of the mapping. Called despite earlier problems,
            with a config in which refused values are replaced.
        resolve: fills in derived fields; called if there are no problems.

    Raises:
        ConfigError: with every problem, if the config cannot run.
    """
    return read_draft(argv, components).finish(check, resolve)


@dataclass(frozen=True)
class Draft:
    """The recipe and overrides of a command line, read but not yet checked against a mapping. Made by `read_draft`."""

    argv: Sequence[str]
    components: Components
    command_line: CommandLine
    settings: Settings
    fallback: dict[str, Any]
    """The value that each field has if nothing sets it: its default, preset or the published model's, by path."""
    config: Config | None
    """The config; None if the recipe cannot be read.

    In place of a refused value it has that of `fallback`, or the recipe's if the command line's is of a wrong type."""

    @property
    def problems(self) -> list[str]:
        """Messages of the problems found so far."""
        return self.settings.problems

    @property
    def source(self) -> str:
        """The origin of the config for messages, such as "my.toml and the command line"; "" if all is by default."""
        words = self.command_line
        return " and ".join(filter(None, [words.recipe, "the command line" * bool(words.overrides or words.problems)]))

    def error(self, *problems: str) -> ConfigError:
        """Return a ConfigError with the problems so far and further ones; without any so far, it names no source."""
        return ConfigError([*self.problems, *problems], self.source if self.problems else "")

    def with_words(self, words: Sequence[str]) -> Draft:
        """Return a new draft for the command line with more words appended. The recipe is not read a second time."""
        return read_draft([*self.argv, *words], self.components, self.settings.recipe)

    def finish(self, check: Callable[[Config], list[str]], resolve: Callable[[Config], Config] | None = None) -> Config:
        """Check the config further, and return it. With --help or --print-config, print and exit with code 0.

        Problems prevent --print-config; --help only needs a recipe that can be read.

        Args:
            check: returns messages of further problems, such as those of the mapping. Called despite earlier problems,
                with a config in which refused values are replaced.
            resolve: fills in derived fields; called if there are no problems.

        Raises:
            ConfigError: with every problem, if the config cannot run.
        """
        if self.config is None:
            raise self.error()
        if self.command_line.help:
            self._print_help_and_exit(self.config)
        values, refused = flatten(self.config), self.settings.refused
        problems = [*self.problems, *(_mention_fallbacks(problem, refused, values) for problem in check(self.config))]
        if problems:
            raise ConfigError(problems, self.source)
        config = resolve(self.config) if resolve else self.config
        if self.command_line.print_config:
            _print_and_exit(to_toml(config))
        return config

    def _print_help_and_exit(self, config: Config) -> NoReturn:
        import shutil

        settings = self.settings
        values = self.fallback | settings.values | {"job.name": config.job.name}
        origins = {path: settings.place_of(path) for path in settings.values}
        width = min(shutil.get_terminal_size().columns, 120)
        _print_and_exit(help_page(Path(sys.argv[0]).name, values, origins, width, self.components))


def read_draft(argv: Sequence[str], components: Components, recipe: Recipe | None = None) -> Draft:
    """Read the recipe and the overrides of a command line. Raises nothing for mistakes of the user: the draft has them.

    Types, ranges and contradictions between fields are checked already, but no mapping. The components that recipe and
    overrides name are imported, and allowed in records of runs (`allow_code`).

    Args:
        argv: words of the command line, a recipe and overrides, such as ["debug", "--training.steps", "10"].
        recipe: the recipe that argv names, if it has been read already.
    """
    words, settings = split_words(argv), Settings(recipe)
    try:
        if words.recipe is not None and recipe is None:
            settings.recipe = read_recipe(str(find_recipe(words.recipe)))
    except RecipeError as error:
        settings.problems = [str(error), *words.problems]
        return Draft(argv, components, words, settings, {}, None)
    if settings.recipe:
        _read_table(settings.recipe.data, "", settings)
    settings.problems += words.problems
    for path, texts in words.overrides.items():
        settings.on_command_line.add(path)
        if path in fields():
            settings.put(fields()[path], texts)
        else:
            settings.own[path] = texts

    allow_code([*code_names(settings.values), *words.allowed_code])
    recipe_name = Path(words.recipe).stem if words.recipe else ""
    model_file = _model_file(settings, components, recipe_name)
    fallback = _fallback(settings, components, model_file)
    _read_own_table(settings, own_fields(fallback))
    if model_file:
        _refuse_disagreements(settings, model_file)
    values = fallback | settings.values | {"model.hf": ""}  # now in the values, so that a resolved config needs no file
    if not values["job.name"]:
        values["job.name"] = recipe_name or f"{values['model.family']}_{values['model.size']}"
    for violation in laws.out_of_range(values):
        settings.add_problem(violation.fields, violation.text)
        settings.refused.update(violation.fields)
        values |= {path: fallback[path] for path in violation.fields}
    config = build(values, components)
    for violation in laws.contradictions(config):
        if settings.refused.isdisjoint(violation.fields):
            settings.add_problem(violation.fields, violation.text)
    return Draft(argv, components, words, settings, fallback, config)


@dataclass
class Settings:
    """The values that a recipe and a command line set, by path, and the problems with them."""

    recipe: Recipe | None
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    """Paths of fields whose given value is refused and replaced, so that later problems may be consequences."""
    on_command_line: set[str] = field(default_factory=set)
    """Paths of the fields that the command line sets."""
    own: dict[str, Any] = field(default_factory=dict)
    """Settings of [model.own]: values of the recipe, or words of the command line, by path.

    Converted once the family is known, which has the fields of this table.
    """

    def put(self, target: Field, given: Any) -> None:
        """Set a field; if its type does not allow the value, mark the field as refused and add a problem.

        A refused field keeps the value that it had. A later value that is allowed ends its refusal, not the problem.

        Args:
            given: the recipe's value or, if the field is in `on_command_line`, the words after the option.
        """
        path = target.path
        if path in self.on_command_line:
            value, text = convert_words(given, target), shorten(" ".join(given)) or '""'
        else:
            value, text = convert(given, target), value_text(given)
        if isinstance(value, WrongType):
            self.refused.add(path)
            self.add_problem((path,), f"{path} = {text} is not {target.expected}{value.correction}")
        else:
            self.refused.discard(path)
            self.values[path] = value

    def place_of(self, path: str) -> str:
        """Return where a field is set: "command line" or a line such as "my.toml:4"; "" if not set or not known."""
        if path in self.on_command_line:
            return "command line"
        return self.recipe.place_of(path) if self.recipe else ""

    def add_problem(self, paths: Iterable[str], text: str) -> None:
        """Add a problem, preceded by the places where the fields of these paths are set."""
        places = ", ".join(dict.fromkeys(filter(None, map(self.place_of, paths))))
        self.problems.append(f"{places}: {text}" if places else text)


# ---- the recipe


def _read_table(data: dict[str, Any], prefix: str, settings: Settings) -> None:
    for key, value in data.items():
        path = prefix + key
        if path in fields():
            settings.put(fields()[path], value)
        elif prefix == f"{OWN}.":
            settings.own[path] = value
        elif (path in tables() or old_names.is_old_table(path)) and isinstance(value, dict):
            _read_table(value, f"{path}.", settings)
        elif path in tables():
            settings.add_problem(
                (path,), f"{path} = {value_text(value)} is not a table: write [{path}] and its fields below"
            )
        else:
            kind = "table" if isinstance(value, dict) else "key"
            few = len(settings.problems) < HINTS
            hint = old_names.advise(path, value) or (_hint(path) if few else "--help lists all fields")
            settings.add_problem((path,), f"unknown {kind} {shorten(path)}: {hint}")


def _read_own_table(settings: Settings, family_fields: dict[str, Field]) -> None:
    """Set the fields of [model.own] from recipe and command line; add a problem for each that the family does not have.

    Without these problems if family or size is refused, so that the family is not known.

    Args:
        settings: the values of the table as they were read, and the settings to change.
        family_fields: the fields that the family has, by path.
    """
    family_known = settings.refused.isdisjoint(("model.family", "model.size"))
    for path, value in settings.own.items():
        if path in family_fields:
            settings.put(family_fields[path], value)
        elif family_known:
            near = closest(path.removeprefix(f"{OWN}."), [field.name for field in family_fields.values()])
            known = (
                f"the family's are {', '.join(family_fields)}" if family_fields else "the family has none of its own"
            )
            hint = f"did you mean {OWN}.{near}?" if near else known
            settings.add_problem((path,), f"unknown key {shorten(path)}: {hint}")


def _hint(path: str) -> str:
    name = path.replace("-", "_")
    near, table = other_names.field_of(name) or nearest_field(path), path.rpartition(".")[0]
    if name in other_names.ADVICE:
        return other_names.ADVICE[name]
    if near:
        return f"did you mean {near}?"
    if table in tables():
        return f"[{table}] has {', '.join(field.name for field in fields().values() if field.table == table)}"
    return f"the tables are {', '.join(tables())}"


# ---- the rest


def _model_file(settings: Settings, components: Components, recipe_name: str) -> ModelFile | None:
    """Read the published model of the field model.hf; return None if it is not set or cannot be read.

    If it cannot be read, its problems are added to `settings`, and the fields of [model] that are not set are marked as
    refused.

    Args:
        components: has the function that reads the model.
        recipe_name: file name of the recipe without extension, the default of job.name; "" without a recipe.
    """
    if not settings.values.get("model.hf") or components.read_model_file is None:
        return None
    values = flatten(Config()) | settings.values
    values["job.name"] = values["job.name"] or recipe_name
    try:
        return components.read_model_file(values)
    except ConfigError as error:
        for problem in error.problems:
            settings.add_problem(("model.hf",), problem)
        settings.refused.update(_other_model_fields(settings))
        return None


def _other_model_fields(settings: Settings) -> set[str]:
    """Return the paths of the fields of [model] that neither recipe nor command line sets."""
    return {path for path, field in fields().items() if field.table == "model"} - settings.values.keys()


def _refuse_disagreements(settings: Settings, file: ModelFile) -> None:
    changes = changed_paths(settings.values.get("model.change", []))
    for path, theirs in file.fixed.items():
        if path not in changes and settings.values.get(path, theirs) != theirs:
            value = toml_value(settings.values.pop(path))
            settings.refused.add(path)
            settings.add_problem(
                (path,),
                f"{path} = {value}, but {file.source} says {toml_value(theirs)}: leave it out, or, if the model is to "
                f"differ from its file, list {toml_value(path.removeprefix('model.'))} in model.change",
            )


def _fallback(settings: Settings, components: Components, model_file: ModelFile | None) -> dict[str, Any]:
    """Return the value that each field has if neither recipe nor command line sets it, by path.

    That is the published model's value, else a preset of a component that the config names, else the schema's default;
    training.steps is -1 if training.epochs is set. If a component cannot be used, `settings` is changed: a problem is
    added, the field is refused, and its value is removed. A refused model.family or model.size refuses all fields of
    [model] that are not set.

    Args:
        components: kinds of components, which have presets.
        model_file: the published model of model.hf; None without one.
    """
    defaults, fixed, from_file = flatten(Config()), {}, {}
    presets: dict[str, Any] = {}
    if model_file:
        from_file = model_file.defaults | model_file.fixed
        changes = changed_paths(settings.values.get("model.change", []))
        fixed = {path: value for path, value in model_file.fixed.items() if path not in changes}
    for kind in components.kinds:
        values = defaults | from_file | settings.values | fixed
        try:
            specs = kind.specs_of(values[kind.field])
            presets |= {path: value for spec in specs for path, value in spec.preset(values).items()}
        except ComponentError as error:
            settings.add_problem(error.fields, str(error))
            for path in error.fields:
                settings.refused.add(path)
                settings.values.pop(path, None)
    if settings.values.get("training.epochs"):
        presets["training.steps"] = -1
    if not settings.refused.isdisjoint(("model.family", "model.size")):
        settings.refused.update(_other_model_fields(settings))
    return defaults | presets | from_file


def _mention_fallbacks(problem: str, refused: set[str], values: dict[str, Any]) -> str:
    """Return a problem's text, followed by the values of mentioned fields that stand in for refused ones.

    A field is mentioned if the last part of its path is a word of the text. `refused` has paths of fields.
    """
    stand_ins = [path for path in values if path in refused and re.search(rf"\b{path.rpartition('.')[2]}\b", problem)]
    if not stand_ins:
        return problem
    values_text = ", ".join(f"{path} = {toml_value(values[path])}" for path in stand_ins)
    return f"{problem} (taking {values_text}, because what was given is refused above)"


def _print_and_exit(text: str) -> NoReturn:
    if is_rank_0():
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:  # as in `train.py --help | head`: leave Python nothing to flush at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
