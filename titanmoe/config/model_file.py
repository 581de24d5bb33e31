"""What the config.json of a published model (`model.hf`) sets in a recipe, and which fields may override it.

`titanmoe.checkpoint.hf.read_model_file` makes a ModelFile; `titanmoe.config.load` merges it with the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelFile:
    """The values of recipe fields that follow from the files of a published model, by path."""

    source: str
    """Name of the file, for messages."""
    fixed: dict[str, Any]
    """Values that define the model. A recipe may repeat them, or override those listed in model.change."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values that hold unless a recipe sets the fields."""


def changed_paths(change: Sequence[str]) -> set[str]:
    """Return the paths of the fields whose names model.change lists (`path_of`)."""
    return {path_of(name) for name in change}


def path_of(name: str) -> str:
    """Return the path of a field from its name in model.change, which leaves out the "model." of fields of [model].

    "dim" is model.dim, "own.x" is model.own.x, and names of other tables, such as "moe.jitter", are paths.
    """
    table = name.partition(".")[0]
    return f"model.{name}" if table in (name, "own") else name
