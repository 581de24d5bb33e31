"""A recipe: a TOML file, and on which line it says what."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any


class RecipeError(ValueError):
    """The file cannot be read, or is not TOML."""


def toml() -> ModuleType:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib


@dataclass
class Recipe:
    name: str
    text: str
    data: dict[str, Any]

    @cached_property
    def lines(self) -> dict[str, int]:
        """The line on which each key's statement begins: cut before it, the text has the key no more."""
        found: dict[str, int] = {}
        begin, lines = 1, self.text.split("\n")
        for count in range(1, len(lines) + 1):
            try:
                data = toml().loads("\n".join(lines[:count]))
            except ValueError:  # inside a statement of several lines
                continue
            for path in _paths(data):
                found.setdefault(path, begin)
            begin = count + 1
        return found

    def where(self, path: str) -> str:
        return f"{self.name}:{self.lines[path]}" if path in self.lines else ""


def read(name: str) -> Recipe:
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"{name}: there is no such file{_hint(Path(name))}") from None
    except OSError as error:
        raise RecipeError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise RecipeError(f"{name}:{line}: byte {byte:#x} is not UTF-8: save the file as UTF-8") from None
    try:
        return Recipe(name, text, toml().loads(text))
    except ValueError as error:
        raise RecipeError(_not_toml(name, text, str(error))) from None


def _hint(path: Path) -> str:
    from difflib import get_close_matches

    near = get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
    return f": did you mean {path.with_name(near[0])}?" if near else ""


def _not_toml(name: str, text: str, why: str) -> str:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", why)
    if not place:
        return f"{name}: is not TOML: {why}"
    line, column = map(int, place.groups())
    hint = " (text stands in double quotes; true and false are lower case)" if why.startswith("Invalid value") else ""
    quoted = text.split("\n")[line - 1].strip()
    return f"{name}:{line}:{column}: is not TOML: {why[: place.start()]}{hint}" + (f", in: {quoted}" if quoted else "")


def _paths(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
