"""The model families: their sizes, and the [model] fields that each size stands for."""

from __future__ import annotations

from titanmoe.config.component_kinds import ComponentKind
from titanmoe.config.schema import OWN, Model, Own
from titanmoe.models.families.family import Family
from titanmoe.models.mixers.mixer_spec import MixerSpec

FAMILIES = ComponentKind(
    "model.family",
    {  # in the order in which they are listed
        "mixtral": "titanmoe.models.families.mixtral:FAMILY",
        "qwen2_moe": "titanmoe.models.families.qwen2_moe:FAMILY",
        "qwen3_moe": "titanmoe.models.families.qwen3_moe:FAMILY",
        "llama3_moe": "titanmoe.models.families.llama3_moe:FAMILY",
        "deepseek_v3": "titanmoe.models.families.deepseek_v3:FAMILY",
        "olmoe": "titanmoe.models.families.olmoe:FAMILY",
        "gpt_oss": "titanmoe.models.families.gpt_oss:FAMILY",
        "minimax_m2": "titanmoe.models.families.minimax_m2:FAMILY",
        "glm4_moe": "titanmoe.models.families.glm4_moe:FAMILY",
        "kimi_k2": "titanmoe.models.families.kimi_k2:FAMILY",
        "glm4_moe_lite": "titanmoe.models.families.glm4_moe_lite:FAMILY",
        "qwen3_next": "titanmoe.models.families.qwen3_next:FAMILY",
        "qwen3_5_moe": "titanmoe.models.families.qwen3_5_moe:FAMILY",
    },
    Family,
)
"""The families that model.family chooses from."""


def family_of(name: str) -> Family:
    """Return the family with a name: one of this package, or "module:NAME" for one that the user has written.

    Raises:
        ComponentError: if there is none.
    """
    return FAMILIES.look_up(name)


def shipped() -> dict[str, Family]:
    """Return the families of this package, by name."""
    return {name: family_of(name) for name in FAMILIES.table}


def names() -> dict[str, list[str]]:
    """Return the names of the sizes of each family of this package, by the family's name."""
    return {name: list(family.sizes) for name, family in shipped().items()}


def preset(family: str, size: str) -> dict[str, object]:
    """Return the [model] fields that a family and a size stand for, by name, "family" and "size" among them.

    Fields that the size leaves out are missing. "own" is the [model.own], for families that have one.

    Raises:
        ComponentError: if there is no such family or size, or the family is inconsistent.
    """
    values = family_of(family).preset({"model.family": family, "model.size": size})
    own = Own({path.removeprefix(f"{OWN}."): value for path, value in values.items() if path.startswith(f"{OWN}.")})
    fields = {path.removeprefix("model."): value for path, value in values.items() if not path.startswith(f"{OWN}.")}
    return {"family": family, "size": size, **fields, **({"own": own} if own else {})}


def mixers(model: Model) -> list[MixerSpec]:
    """Return the spec of each block's mixer; the block of multi-token prediction comes last, with the last layer's."""
    family = family_of(model.family)
    layers = [family.mixer(model, layer) for layer in range(model.num_layers)]
    return layers + layers[-1:] * model.mtp_depth
