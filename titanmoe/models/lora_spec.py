"""Low-rank adapters (arXiv 2106.09685) without torch: names, shapes and sharded dims, and which options are refused.

    y = W x + alpha / r * B A x      A (r, inputs), B (outputs, r); of routed experts (e, r, inputs), (e, outputs, r)

Each adapter shares one dim with its matrix: A the inputs, B the outputs. Where tp or etp shards that dim of the matrix,
it shards the adapter's too. The other of the two is replicated then, on each rank with a summand of its gradient, which
`titanmoe.parallel.parallel_plan.sum_replicated` adds up. The modules are in titanmoe.models.lora.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from titanmoe.config.fields import toml_value
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config, LoRA
from titanmoe.models.mixers.mixer_spec import Shape, Split

if TYPE_CHECKING:
    from titanmoe.models.tensors import Tuning

ADAPTER = "lora_"
"""Prefix of the names of A and B."""
MATRICES = ("w1", "w2", "w3")
"""Matrices of feed-forward networks that may have adapters."""


def is_adapter(name: str) -> bool:
    """Return whether the parameter with this name is an adapter's A or B."""
    return ADAPTER in name


def is_adaptable(name: str) -> bool:
    """Return whether a parameter, such as "layers.3.attention.wq.weight", is a matrix that may have adapters.

    Such are the matrices "w..." of mixers, dense networks, shared experts and routed experts. Routers, gates of shared
    experts, embedding, head and the projection of multi-token prediction are not among them.
    """
    kind, _, leaf = name.removesuffix(".weight").rpartition(".")
    if kind.endswith(".attention"):
        return leaf.startswith("w") and name.endswith(".weight")
    return kind.endswith((".ffn", ".shared", ".experts")) and leaf in MATRICES


def adapter_names(matrix: str) -> tuple[str, str]:
    """Return the names of a matrix's A and B, such as "wq.lora_A" for "wq.weight", or "w1_lora_A" for experts' "w1"."""
    base = f"{matrix.removesuffix('.weight')}." if matrix.endswith(".weight") else f"{matrix}_"
    return f"{base}{ADAPTER}A", f"{base}{ADAPTER}B"


def shared_dim(adapter: str) -> int:
    """Return the dim of an adapter that is not the rank: the inputs of A, the outputs of B.

    Args:
        adapter: name of the A or B. Those of routed experts have the experts as dim 0.
    """
    outputs = 1 if f"_{ADAPTER}" in adapter else 0  # experts come before
    return outputs + adapter.endswith("A")


def adapter_splits(matrix: str, split: Split, rank: int) -> dict[str, Split]:
    """Return the full shape and the sharded dim of a matrix's A and B, by their names (`adapter_names`).

    Only the one that shares the matrix's sharded dim is sharded; the other's is None.

    Args:
        matrix: name of the matrix, such as "attention.wq.weight".
        split: shape of the matrix, (outputs, inputs) or (experts, outputs, inputs), and the dim that tp or etp shards.
        rank: rank of the adapters.
    """
    (*experts, outputs, inputs), dim = split
    shapes = (*experts, rank, inputs), (*experts, outputs, rank)
    names = adapter_names(matrix)
    return {name: (shape, dim if dim == shared_dim(name) else None) for name, shape in zip(names, shapes, strict=True)}


def divisor(lora: LoRA, rank: float) -> float:
    """Return what alpha is divided by to scale an adapter's product: its rank or, with lora.rslora, the rank's root."""
    return math.sqrt(rank) if lora.rslora else rank


# ---- what is refused


def without_rank(config: Config) -> Iterator[Violation]:
    """Yield a Violation for each option of [lora] that is not its default, and for checkpoint.initial_adapter, if set.

    Call it for a recipe with lora.rank = 0: the rank is not looked at.
    """
    for name in ("targets", "experts_rank", "alpha", "rslora", "dropout"):
        if (value := getattr(config.lora, name)) != getattr(LoRA(), name):
            yield Violation(
                (f"lora.{name}", "lora.rank"),
                f"lora.{name} = {toml_value(value)} does nothing with lora.rank = 0, which makes no adapters: set "
                f"rank, such as 16, or leave {name} out",
            )
    if folder := config.checkpoint.initial_adapter:
        yield Violation(
            ("checkpoint.initial_adapter", "lora.rank"),
            f'checkpoint.initial_adapter = "{folder}" begins from adapters, and lora.rank = 0 makes none: set the '
            "rank that they have, or leave initial_adapter out",
        )


def of_routers(patterns: list[str]) -> Iterator[Violation]:
    """Yield a Violation for each of these patterns of lora.targets, which match routers, but no matrix to adapt.

    That they do is not checked.
    """
    for pattern in patterns:
        yield Violation(
            ("lora.targets",),
            f'lora.targets has "{pattern}", and routers have no adapters: frozen, they send tokens to the experts that '
            "the base model was trained with, and their product takes one matrix, in router_dtype: leave it out",
        )


def contradictions(config: Config, tuning: Tuning, shapes: Mapping[str, Shape]) -> Iterator[Violation]:
    """Yield a Violation for training.freeze, for moe.expert_dtype except "compute", and for a rank that is too high.

    Call it for a recipe with adapters. Too high is a rank that exceeds the smaller side of every matrix that it is for;
    at most one is named. `shapes` are those of all parameters, by name.
    """
    lora = config.lora
    yield from _high_rank(config, tuning, shapes)
    if config.training.freeze:
        yield Violation(
            ("training.freeze", "lora.rank"),
            f"training.freeze is not used with lora.rank = {lora.rank}, with which only adapters are trained: leave "
            "freeze out, and let lora.targets say which matrices have them",
        )
    if config.moe.expert_dtype != "compute":
        yield Violation(
            ("lora.rank", "moe.expert_dtype"),
            f"lora.rank = {lora.rank} adds to products in mixed_precision_param, and moe.expert_dtype = "
            f'"{config.moe.expert_dtype}" rounds the frozen experts to 8 bits (a quantised base, which has no adapters '
            'here): use expert_dtype = "compute"',
        )


def _high_rank(config: Config, tuning: Tuning, shapes: Mapping[str, Shape]) -> Iterator[Violation]:
    """Yield at most one Violation: a rank in [lora] that exceeds the smaller side of every matrix that it is for.

    A rank that exceeds that of some of the matrices alone is allowed. lora.rank is looked at first, lora.experts_rank
    second. `shapes` are those of all parameters, by name.
    """
    for field, rank, of_experts in (
        ("lora.rank", tuning.rank, False),
        ("lora.experts_rank", tuning.experts_rank, True),
    ):
        sides = [
            min(shape[-2:])
            for name, shape in shapes.items()
            if tuning.rank_of(name) and (".experts." in name) == of_experts
        ]
        if sides and rank > max(sides):
            derived = " (-1: lora.rank // model.top_k)" if of_experts and config.lora.experts_rank == -1 else ""
            yield Violation(
                (field, "model.family"),
                f"{field} = {rank}{derived} exceeds {max(sides)}, the smaller side of the largest matrix "
                f"that it adapts: more than {max(sides)} adds nothing: use at most that",
            )
            return
