"""Parsing of a command line into the recipe, overrides of fields, and problems; and the words that set fields.

`titanmoe.config.load` calls `split_words`. It is not argparse, because all problems of a command line and its recipe
are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanmoe.config import old_names, other_names
from titanmoe.config.field_values import nearest_field, shorten
from titanmoe.config.fields import fields, tables
from titanmoe.config.recipe import parse_toml, shipped_recipes
from titanmoe.config.schema import OWN

_OPTION = re.compile(r"--|-[A-Za-z]")
"""Pattern of the beginning of an option. A negative number is a value."""
HINTS = 20
"""Number of problems up to which unknown names get a suggestion, which costs a comparison with all fields."""


@dataclass
class CommandLine:
    """The parts of a parsed command line."""

    recipe: str | None = None
    overrides: dict[str, list[str]] = field(default_factory=dict)
    """The words that follow each option --TABLE.FIELD, by the field's path."""
    help: bool = False
    print_config: bool = False
    allowed_code: list[str] = field(default_factory=list)
    """Names given with --allow-code, which the records of a teacher or of adapters may contain."""
    problems: list[str] = field(default_factory=list)
    """Messages about words that cannot be parsed."""

    def set_recipe(self, name: str) -> None:
        """Set the recipe; add a problem if the command line has named one before."""
        if self.recipe is None:
            self.recipe = name
        else:
            self.problems.append(
                f"command line: two recipes are given, {self.recipe} and {name}: a run has one, "
                "put the rest into overrides"
            )


def to_words(values: Mapping[str, Any]) -> list[str]:
    """Return the words that set fields on a command line: ["--training.steps", "100"] for {"training.steps": 100}.

    A boolean is "true" or "false", each item of a list a word of its own, an empty list the word "".
    """
    words = []
    for path, value in values.items():
        items = (value or [""]) if isinstance(value, list | tuple) else [value]
        words += [f"--{path}", *(str(x).lower() if isinstance(x, bool) else str(x) for x in items)]
    return words


def split_words(argv: Sequence[str]) -> CommandLine:
    """Parse a command line into the recipe, overrides of fields, and problems. Raises nothing.

    Values are not checked here, and the recipe is not read. Of a repeated field the last value counts.

    Args:
        argv: words after the program's name, such as ["debug", "--training.steps", "10"].
    """
    line = CommandLine()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "-h":
            argument = "--help"
        first = len(rest) == len(argv) - 1
        if not argument.startswith("-") and (
            first or Path(argument).suffix == ".toml" or argument in shipped_recipes()
        ):
            line.set_recipe(argument)
            continue
        if not argument.startswith("--"):
            line.problems.append(
                f"command line: {argument!r} does not belong to an option: fields are set as in --training.steps 10"
            )
            continue
        name, attached, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        known = fields().get(name)
        following = next((i for i, text in enumerate(rest) if _OPTION.match(text)), len(rest))
        if attached or name in ("help", "print_config"):
            following = 0
        elif name in ("config", "allow_code") or (known and not known.item) or name.startswith(f"{OWN}."):
            following = min(following, 1)
        texts, rest = [value] if attached else rest[:following], rest[following:]

        if name in ("help", "print_config"):
            setattr(line, name, True)
        elif name == "config" and not (texts and texts[0]):
            line.problems.append("command line: --config needs a file, as in --config train_configs/debug.toml")
        elif name == "config":
            line.set_recipe(texts[0])
        elif name == "allow_code" and not (texts and ":" in texts[0]):
            line.problems.append("command line: --allow-code needs a name, as in --allow-code my_package.mine:Mine")
        elif name == "allow_code":
            line.allowed_code += texts
        elif name.startswith(f"{OWN}.") or (known and (texts or known.kind is bool)):
            line.overrides[name] = texts or ["true"]
        elif known:
            line.problems.append(f"command line: --{name} needs a value, {known.expected}")
        elif name in tables():
            members = ", ".join(f"--{path}" for path in fields() if path.rpartition(".")[0] == name)
            members = members or "the family's own"
            line.problems.append(f"command line: --{name} is a table, not a field: its fields are {members}")
        else:
            near = nearest_field(name) if len(line.problems) < HINTS else ""
            hint = f"did you mean --{near}?" if near else "--help lists them all"
            hint = old_names.advise(name, _value(texts), "--") or other_names.hint(name, texts) or hint
            line.problems.append(f"command line: unknown option {shorten(argument.partition('=')[0])}: {hint}")
    return line


def _value(texts: list[str]) -> Any:
    """Return the value of an unknown option from the words after it, typed as in TOML. True if there are none.

    Several words are returned as a list of texts, and a word that is not TOML as text.
    """
    try:
        return parse_toml(f"value = {texts[0]}")["value"] if len(texts) == 1 else texts or True
    except ValueError:  # a string without quotes
        return texts[0]
