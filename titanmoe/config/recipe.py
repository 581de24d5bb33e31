"""Reading of recipes: TOML text with limits on size and depth, and the line of each key for messages.

Called by titanmoe.config.load, and for other TOML files. TOML parsers tell no lines, so each statement is parsed by
itself to find the line of its keys.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from titanmoe.config.parse_json import is_deeper

MAX_BYTES = 1 << 20
"""Largest size of a recipe in bytes; the file is read into memory."""
MAX_DEPTH = 16
"""Largest nesting of tables and lists; a recipe needs 3."""
MAX_REPARSED = 2 << 20
"""Characters that are parsed a second time to find the lines of keys. Keys after that have no line."""

_PART = re.compile(r"""[ \t]*("[^"\n]*"|'[^'\n]*'|[\w-]+)[ \t]*""")
_CLOSES = re.compile(r"""[]}]|\"{3}|'{3}""")


class RecipeError(ValueError):
    """The error for a recipe that cannot be read or is not TOML."""


def toml_module() -> ModuleType:
    """Return the TOML parser: tomllib, or tomli before Python 3.11."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib


@dataclass
class Recipe:
    """The text and the parsed tables of a recipe."""

    name: str
    text: str
    data: dict[str, Any]

    @cached_property
    def lines(self) -> dict[str, int]:
        """The number of the line on which each key is set, from 1, by path.

        Statements are parsed one by one to find it. Keys behind the first MAX_REPARSED characters are missing.
        """
        lines: dict[str, int] = {}
        begin, header, statement, parsed = 1, "", "", 0
        for number, line in enumerate(self.text.split("\n"), 1):
            if statement and not _CLOSES.search(line):  # so that a long array is not parsed once per line
                statement += line + "\n"
                continue
            statement += line + "\n"
            parsed += len(header) + len(statement)
            if parsed > MAX_REPARSED:
                break
            try:
                data = parse_toml(header + statement)
            except ValueError:  # inside a statement of several lines
                continue
            for path in _paths(data):
                lines.setdefault(path, begin)
            if statement.lstrip().startswith("["):
                header = statement
            begin, statement = number + 1, ""
        return lines

    def place_of(self, path: str) -> str:
        """Return the file and line that set a field, such as "my.toml:4"; "" if it is not set, or not in `lines`."""
        return f"{self.name}:{self.lines[path]}" if path in self.lines else ""


def read_recipe(name: str) -> Recipe:
    """Read and parse the recipe in the file `name`. Raises RecipeError if it is unreadable, too long or no TOML.

    A shipped recipe's name is not looked up (`find_recipe`), only suggested in the error.
    """
    try:
        with open(name, "rb") as stream:
            return parse_recipe(name, stream.read(MAX_BYTES + 1))
    except FileNotFoundError:
        raise RecipeError(f"{name}: there is no such file{_suggestion(Path(name))}") from None
    except OSError as error:
        raise RecipeError(
            f"{name}: cannot be read: {error.strerror}: name a TOML file, and check its permissions"
        ) from None


def parse_recipe(name: str, data: bytes) -> Recipe:
    """Parse the bytes of a recipe's file.

    Args:
        name: the name of the file, for messages.

    Raises:
        RecipeError: if the bytes are too many, not UTF-8 or not TOML.
    """
    try:
        if len(data) > MAX_BYTES:
            raise RecipeError(f"{name}: has more than {MAX_BYTES:,} bytes, too many for a recipe: name another file")
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise RecipeError(f"{name}:{line}: byte {byte:#x} is not UTF-8: save the file as UTF-8") from None
    try:
        return Recipe(name, text, parse_toml(text))
    except ValueError as error:
        raise RecipeError(_syntax_message(name, text, str(error))) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text to nested dicts. Raises ValueError if it is not TOML or nested deeper than MAX_DEPTH."""
    too_deep = ValueError(
        f"tables or lists are nested more than {MAX_DEPTH} deep, which no field needs: remove brackets or dots"
    )
    if _longest_key(text) > 4 * MAX_DEPTH:
        raise too_deep
    try:
        data = toml_module().loads(text)
    except RecursionError:
        raise too_deep from None
    if is_deeper(data, MAX_DEPTH):
        raise too_deep
    return data


def _longest_key(text: str) -> int:
    """Return about the largest number of dotted names in one key (or string) of a TOML text, up to two too few.

    The parser's time grows with its square.
    """
    longest = run = 0
    for part in text.split("."):
        run = run + 1 if _PART.fullmatch(part) else 0
        longest = max(longest, run)
    return longest


def _suggestion(path: Path) -> str:
    from difflib import get_close_matches

    near = get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
    if near:
        return f": did you mean {path.with_name(near[0])}?"
    shipped = get_close_matches(path.stem, shipped_recipes(), n=1)
    return f": did you mean {shipped[0]}, which comes with titanmoe?" if shipped else ""


def _syntax_message(name: str, text: str, why: str) -> str:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", why)
    if not place:
        return f"{name}: is not TOML: {why}"
    line, column = map(int, place.groups())
    hint = " (strings need double quotes; true and false are lower case)" if why.startswith("Invalid value") else ""
    quoted = text.split("\n")[line - 1].strip()
    quoted = quoted if len(quoted) <= 120 else f"{quoted[:117]}..."
    return f"{name}:{line}:{column}: is not TOML: {why[: place.start()]}{hint}" + (f", in: {quoted}" if quoted else "")


def _paths(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")


# ---- the recipes that come with titanmoe


SHIPPED = Path(__file__).resolve().parents[1] / "train_configs"
"""Folder of the shipped recipes. In a checkout it is a link to train_configs/ at the top."""


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with titanmoe, such as "debug", sorted."""
    return sorted(file.stem for file in SHIPPED.glob("*.toml"))


def find_recipe(name_or_path: str | Path) -> Path:
    """Return the path of a recipe: the given path if it is a file, else that of the shipped recipe, such as "debug".

    A path that is neither is returned unchanged, and `read_recipe` refuses it with a suggestion.
    """
    path = Path(name_or_path)
    if not path.is_file() and str(path) in shipped_recipes():
        return SHIPPED / f"{path}.toml"
    return path
