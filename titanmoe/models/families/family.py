"""What a family of models is: its sizes, and how Hugging Face stores them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from titanmoe.config.parts import PartError, Rules
from titanmoe.config.schema import Model
from titanmoe.models.families.huggingface import HuggingFace

NAMED = ("model.family", "model.size")


@dataclass(frozen=True)
class Family(Rules):
    sizes: Mapping[str, Mapping[str, object]]
    """Each with the [model] fields that it stands for; those left out keep their defaults."""
    hf: HuggingFace
    """How it is written for transformers."""

    def preset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        family, size = (values[path] for path in NAMED)
        if self.hf.family != family:
            raise PartError(NAMED, f"model.family = {family!r} cannot be used: its hf says family = {self.hf.family!r}")
        if size not in self.sizes:
            near = get_close_matches(size.lower(), self.sizes, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(self.sizes)
            raise PartError(NAMED, f"model.size = {size!r} is not a size of {family}.{hint} Known: {known}")
        shape = self.sizes[size]
        if other := shape.keys() - {field.name for field in fields(Model)}:
            text = f"its size {size!r} has {', '.join(sorted(other))}, no field of [model]"
            raise PartError(NAMED, f"model.family = {family!r} cannot be used: {text}")
        return {f"model.{name}": value for name, value in shape.items()}
