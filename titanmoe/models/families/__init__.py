"""The model families: which sizes there are, and the [model] fields each stands for."""

from __future__ import annotations

from typing import cast

from titanmoe.config.parts import Kind
from titanmoe.models.families.family import Family

FAMILIES = Kind(
    "model.family",
    {  # in the order in which they are listed
        name: f"titanmoe.models.families.{name}:FAMILY"
        for name in ("mixtral", "qwen2_moe", "qwen3_moe", "llama3_moe", "deepseek_v3", "olmoe", "gpt_oss")
    },
    Family,
)


def family_of(name: str) -> Family:
    return cast(Family, FAMILIES.look_up(name))


def shipped() -> dict[str, Family]:
    return {name: family_of(name) for name in FAMILIES.table}


def names() -> dict[str, list[str]]:
    """The sizes of each family."""
    return {name: list(family.sizes) for name, family in shipped().items()}


def preset(family: str, size: str) -> dict[str, object]:
    """The [model] fields that a family and a size stand for; PartError if there are none such."""
    fields = family_of(family).preset({"model.family": family, "model.size": size})
    return {"family": family, "size": size, **{path.removeprefix("model."): value for path, value in fields.items()}}
