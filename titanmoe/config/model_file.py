"""What a model's own file (`model.hf`) says of a recipe, and what the recipe may say besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelFile:
    """What it says, by path of the recipe's fields."""

    source: str
    """The file, for a message."""
    fixed: dict[str, Any]
    """What the model is: a recipe may repeat it, or list the field in model.change."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What a recipe that does not set these fields has."""


def changed_paths(change: Sequence[str]) -> set[str]:
    """The fields that model.change lists: those of [model] by their name alone, others by their path."""
    return {path_of(name) for name in change}


def path_of(name: str) -> str:
    table = name.partition(".")[0]
    return f"model.{name}" if table in (name, "own") else name


def disagreements(file: ModelFile, values: Mapping[str, Any], change: Sequence[str]) -> list[str]:
    """Paths of the fields that are set to something else than the file says, and not listed."""
    changes = changed_paths(change)
    return [path for path, value in file.fixed.items() if values.get(path, value) != value and path not in changes]


def listed_as(path: str) -> str:
    """How model.change lists a field."""
    return path.removeprefix("model.")
