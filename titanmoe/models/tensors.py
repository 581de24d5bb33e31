"""The parameters of a model, by name, from its shape alone; and which of them a recipe freezes. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache

from titanmoe.config.blocks import has_experts
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config, Model
from titanmoe.models.families import mixers
from titanmoe.models.mixers.rules import MixerRules, Shape, Split


def swiglu(dim: int, hidden: int) -> dict[str, Split]:
    return {"w1.weight": ((hidden, dim), 0), "w3.weight": ((hidden, dim), 0), "w2.weight": ((dim, hidden), 1)}


def under(prefix: str, tensors: dict[str, Split]) -> dict[str, Split]:
    return {f"{prefix}.{name}": split for name, split in tensors.items()}


def of_block(model: Model, mixer: MixerRules, experts: bool) -> dict[str, Split]:
    """Those of a block that are sharded over attention's data ranks: all but its router and its experts."""
    norm: Split = ((model.dim,), None)
    splits = mixer.matrices(model) + mixer.vectors(model) + mixer.norms(model)
    names = mixer.names(model) or [f"({n})" for n in range(len(splits))]
    tensors = {"attention_norm.weight": norm, "ffn_norm.weight": norm}
    tensors |= under("attention", dict(zip(names, splits, strict=True)))
    if not experts:
        return tensors | under("ffn", swiglu(model.dim, model.dense_hidden))
    if model.shared_hidden:
        tensors |= under("moe.shared", swiglu(model.dim, model.shared_hidden))
        tensors |= {"moe.shared.gate.weight": ((1, model.dim), None)} if model.shared_gate else {}
    return tensors


def of_router(model: Model) -> dict[str, Shape]:
    bias: dict[str, Shape] = {"moe.router.bias": (model.num_experts,)} if model.router_bias else {}
    return {"moe.router.weight": (model.num_experts, model.dim)} | bias


def of_experts(model: Model) -> dict[str, Shape]:
    experts, hidden, dim = model.num_experts, model.expert_hidden, model.dim
    matrices: dict[str, Shape] = {"w1": (experts, hidden, dim), "w3": (experts, hidden, dim)}
    matrices["w2"] = experts, dim, hidden
    biases: dict[str, Shape] = {f"{name}_bias": shape[:2] for name, shape in matrices.items()}
    tensors = matrices | (biases if model.expert_biases else {})
    return {f"moe.experts.{name}": shape for name, shape in tensors.items()}


def block_name(model: Model, layer: int) -> str:
    return f"layers.{layer}" if layer < model.num_layers else "mtp.0.block"


def names(model: Model) -> Iterator[str]:
    """Of all parameters, as checkpoints have them: a tied embedding and its copies are one."""
    yield "embed.weight"
    for layer, mixer in enumerate(mixers(model)):
        experts = has_experts(model, layer)
        tensors = [*of_block(model, mixer, experts), *([*of_router(model), *of_experts(model)] if experts else [])]
        yield from (f"{block_name(model, layer)}.{name}" for name in tensors)
    if model.mtp_depth:
        yield from (f"mtp.0.{name}.weight" for name in ("hidden_norm", "embed_norm", "project", "norm"))
    yield "head.norm.weight"
    if not model.tie_embeddings:
        yield "head.weight"


def stored_name(name: str, tied: bool) -> str:
    """The name in checkpoints: the embedding and its copies on the last pipeline stage are one tensor there."""
    return "embed.weight" if name == "embed_copy.weight" or (tied and name == "head.weight") else name


# ---- which are frozen


@lru_cache(maxsize=1 << 16)
def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_frozen(name: str, config: Config) -> bool:
    """name: of a parameter, on whatever pipeline stage."""
    patterns = tuple(config.training.freeze)
    return bool(patterns) and matches(stored_name(name, config.model.tie_embeddings), patterns)


def contradictions(config: Config) -> Iterator[Violation]:
    patterns = config.training.freeze
    if not patterns:
        return
    fields = ("training.freeze", "model.family")
    if unnamed := next((mixer for mixer in mixers(config.model) if not mixer.names(config.model)), None):
        yield Violation(
            fields,
            f"training.freeze goes by the names of parameters, and the rules of the {unnamed.name} of model.family = "
            f'"{config.model.family}" do not state them: add `names` there (docs/extending.md), or leave freeze empty',
        )
        return
    everything = list(names(config.model))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in everything):
            some = f"layers.{config.model.num_layers - 1}."
            last = ", ".join(name.replace(some, "layers.*.") for name in everything if name.startswith(some))
            yield Violation(
                fields,
                f'training.freeze has "{pattern}", which is the name of no parameter: there are embed.weight, {last}, '
                "head.norm.weight" + ("" if config.model.tie_embeddings else ", head.weight"),
            )
    if all(matches(name, tuple(patterns)) for name in everything):
        yield Violation(
            fields,
            f"training.freeze freezes all {len(everything)} parameters, and nothing is left to train: leave some out",
        )
