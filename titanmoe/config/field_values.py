"""Conversion of values to the types of their fields, and suggestions where a value or a name is wrong.

`load` converts the values of recipes with `convert` and the words of command lines with `convert_words`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from titanmoe.config import ranges
from titanmoe.config.fields import Field, fields, tables, toml_value
from titanmoe.config.old_names import new_value
from titanmoe.config.recipe import parse_toml

SAMPLES: dict[type, list] = {int: [1, 2], float: [0.7, 0.3], str: ["a", "b"], dict: [{"match": ["a"]}]}


class WrongType(NamedTuple):
    """Returned by a conversion in place of a value that the field's type does not allow."""

    correction: str
    """The end of the error message, such as ": write 3"."""


def convert(value: Any, target: Field) -> Any:
    """Return a value of a recipe in the field's type, or a WrongType. Integers for a float field become floats.

    No other type is converted: true and 1.0 are no integers. An integer from 2^63 on becomes inf for a float field,
    which its range refuses; in a list it makes a WrongType. Ranges are not checked here.
    """
    if target.item:
        if isinstance(value, list) and target.item is float:
            value = [float(item) if type(item) is int and abs(item) < ranges.LIMIT else item for item in value]
        if isinstance(value, list) and all(type(item) is target.item for item in value):
            return value
    elif target.choices:
        if value in target.choices:
            return value
    elif target.kind is float and type(value) is int:
        return float(value) if abs(value) < ranges.LIMIT else math.inf
    elif type(value) is target.kind:
        return value
    return WrongType(_correction(value, target))


def convert_words(texts: list[str], target: Field) -> Any:
    """Convert the words after an option to the field's type; return a WrongType if that is impossible.

    Args:
        texts: one word or, for a list, its items, a single word such as "[1, 2]", or [""] for an empty list.
    """
    if not target.item:
        value = parse(texts[0], target.kind)
        return convert(texts[0] if value is None else value, target)
    if texts == [""]:
        return []
    if len(texts) == 1 and texts[0].startswith("["):
        try:
            return convert(parse_toml(f"list = {texts[0]}")["list"], target)
        except ValueError:
            return convert(texts[0], target)
    values = [parse(text, target.item) for text in texts]
    return convert(texts if None in values else values, target)


def parse(text: str, value_type: Any) -> Any:
    """Parse a text as an int, float, str or bool ("true", "false", in any case); None if it cannot be, and for dict."""
    if value_type is dict:
        return None
    if value_type is bool:
        return {"true": True, "false": False}.get(text.lower())
    try:
        return value_type(text) if value_type in (int, float) else text
    except ValueError:
        return None


def value_text(value: Any) -> str:
    """Return a value as TOML, at most 80 characters, for messages."""
    return shorten(toml_value(value))


def shorten(text: str) -> str:
    """Return the text, truncated to 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def _correction(value: Any, target: Field) -> str:
    if new := new_value(target.path, value):
        return f": it is called {new} now"
    if target.choices:
        near = closest(value if isinstance(value, str) else toml_value(value), target.choices)
        return f": did you mean {near}?" if near else ""
    if target.item:
        sample = [value] if type(value) is target.item else SAMPLES[target.item]
        return f": write it as {value_text(sample)}"
    if isinstance(value, str) and parse(value, target.kind) is not None:
        return f": write {toml_value(parse(value, target.kind))}, without quotes"
    number = parse(value, float) if isinstance(value, str) else value
    if target.kind is int and isinstance(number, float) and number.is_integer() and abs(number) < ranges.LIMIT:
        return f": write {int(number)}"
    if target.kind is str and isinstance(value, int | float):
        return f": write {toml_value(toml_value(value))}, in quotes"
    return "" if target.kind is bool else f", such as {toml_value(target.default)}"


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar of the known names; "" if none is similar enough.

    Args:
        cutoff: the least similarity, from 0 to 1.
    """
    from difflib import get_close_matches

    return next(iter(get_close_matches(name.lower(), known, n=1, cutoff=cutoff)), "")


@cache
def _names() -> dict[str, tuple[str, str, str]]:
    return {other: other.rpartition(".") for other in [*fields(), *tables()]}


def nearest_field(path: str) -> str:
    """Return the path of the field or table that an unknown path probably means; "" if none is similar.

    Preferred are the same name in another table (lora_rank is lora.rank), then a similar name in the same table, then
    any similar path.
    """
    table, _, name = path.replace("-", "_").rpartition(".")
    known = _names()
    same = [other for other, (_, _, field_name) in known.items() if name in (field_name, other.replace(".", "_"))]
    if same:
        return closest(path, same) or min(same, key=lambda other: other.count("."))
    siblings = {field_name: other for other, (where, _, field_name) in known.items() if where == table}
    near = closest(name, siblings)
    return siblings[near] if near else closest(path, fields(), cutoff=0.75)
