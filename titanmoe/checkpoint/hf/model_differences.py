"""Compare two [model] tables by what they compute: fields without effect, and equal ways to route, do not count.

Called to refuse a recipe that differs from its config.json. Both tables are first brought to one form, in which unused
fields have their defaults and values that mean the same are equal.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Model
from titanmoe.models.families import family_of
from titanmoe.models.families.family import attention
from titanmoe.moe.score_functions import score_function_of

OWN_PREFIX = "own."
"""Prefix of the names of [model.own]'s fields."""
NOT_THE_MODEL = (
    "hf",
    "change",
    "family",
    "size",
    "init_std",
    "moe_every",
    "mtp_depth",
    "mtp_after_norm",
    "media_tokens",
)
_YARN = [f.name for f in fields(Model) if f.name.startswith("rope_") and f.name not in ("rope_theta", "rope_scaling")]


def effective_fields(model: Model) -> dict[str, Any]:
    """Return the fields of [model] that determine what a model computes, by name, in a form that can be compared.

    Fields without effect in this model have their defaults, and values that mean the same are replaced by one of them.
    hf, change, family, size, init_std, media_tokens and multi-token prediction are left out, fields of [model.own] are
    "own.NAME", and num_dense_layers, which stands for moe_every too, is the list of dense layers.
    """
    unused: list[str] = []
    if model.rope_scaling == "none":
        unused += _YARN
    if model.num_groups == 1:
        unused += ["top_groups"]
    if not model.shared_hidden:
        unused += ["shared_gate"]
    if not model.sliding_window and family_of(model.family).mixer is attention:
        unused += ["full_attention_every"]
    if not has_dense_layers(model):
        unused += ["dense_hidden"]
    values = asdict(model) | {name: getattr(Model(), name) for name in unused}
    values |= score_function_of(model).equivalent
    values["num_dense_layers"] = [i for i in range(model.num_layers) if not has_experts(model, i)]
    values |= {f"{OWN_PREFIX}{name}": value for name, value in values.pop("own").items()}
    return {name: value for name, value in values.items() if name not in NOT_THE_MODEL}


def differing_fields(a: Model, b: Model) -> list[str]:
    """Return the names, as in `effective_fields`, of the fields by which `a` computes something else than `b`.

    Fields of [model.own] that only the family of `b` has are not compared.
    """
    left, right = effective_fields(a), effective_fields(b)
    return [name for name in left if left[name] != right.get(name)]


def has_dense_layers(model: Model) -> bool:
    """Return whether a layer of the model has a dense feed-forward network instead of experts."""
    return not all(has_experts(model, i) for i in range(model.num_layers))


def field_value(model: Model, name: str) -> Any:
    """Return the value of a field of [model], or of [model.own] if the name begins with "own."."""
    return model.own[name.removeprefix(OWN_PREFIX)] if name.startswith(OWN_PREFIX) else getattr(model, name)
