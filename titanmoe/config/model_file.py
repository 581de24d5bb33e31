"""What the config.json of a published model (`model.hf`) sets in a recipe, and which fields may override it.

`titanmoe.checkpoint.hf.read_model_file` makes a ModelFile; `titanmoe.config.load` merges it with the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelFile:
    """The values of recipe fields that a published model's files give, by path."""

    source: str
    """Name of the file, for messages."""
    fixed: dict[str, Any]
    """Values that define the model. A recipe may repeat them, or override those listed in model.change."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values that a recipe overrides by setting the fields."""


def changed_paths(change: Sequence[str]) -> set[str]:
    """Return the paths of the fields that model.change lists."""
    return {path_of(name) for name in change}


def path_of(name: str) -> str:
    """Return the path of a field as model.change names it: fields of [model] by their name, others by their path."""
    table = name.partition(".")[0]
    return f"model.{name}" if table in (name, "own") else name


def disagreements(file: ModelFile, values: Mapping[str, Any], change: Sequence[str]) -> list[str]:
    """Return the paths of fields that a recipe sets to other values than the file without listing them."""
    changes = changed_paths(change)
    return [path for path, value in file.fixed.items() if values.get(path, value) != value and path not in changes]


def listed_as(path: str) -> str:
    """Return the name by which model.change lists a field, given its path."""
    return path.removeprefix("model.")
