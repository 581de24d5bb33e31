"""The parameters of a model, by name, from its shape alone; and which of them a recipe freezes. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from titanmoe.config.blocks import has_experts
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config, LoRA, Model
from titanmoe.models.families import mixers
from titanmoe.models.mixers.mixer_rules import MixerRules, Shape, Split


def swiglu(dim: int, hidden: int) -> dict[str, Split]:
    return {"w1.weight": ((hidden, dim), 0), "w3.weight": ((hidden, dim), 0), "w2.weight": ((dim, hidden), 1)}


def under(prefix: str, tensors: dict[str, Split]) -> dict[str, Split]:
    return {f"{prefix}.{name}": split for name, split in tensors.items()}


def of_block(model: Model, mixer: MixerRules, experts: bool, tp: int = 1) -> dict[str, Split]:
    """Those of a block that are sharded over attention's data ranks: all but its router and its experts."""
    norm: Split = ((model.dim,), None)
    splits = mixer.matrices(model) + mixer.vectors(model) + mixer.norms(model)
    names = mixer.names(model) or [f"({n})" for n in range(len(splits))]
    tensors = {"attention_norm.weight": norm, "ffn_norm.weight": norm}
    whole = mixer.whole(model, tp)
    own = {name: (shape, None if name in whole else dim) for name, (shape, dim) in zip(names, splits, strict=True)}
    tensors |= under("attention", own)
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


def shapes(model: Model, tuning: Tuning | None = None) -> Iterator[tuple[str, Shape]]:
    """Of all parameters, by their names in checkpoints: a tied embedding and its copies are one. tuning: brings
    adapters."""
    norm, ends = (model.dim,), (model.vocab_size, model.dim)
    yield "embed.weight", ends
    for layer, mixer in enumerate(mixers(model)):
        block, experts = block_name(model, layer), has_experts(model, layer)
        parts = of_block(model, mixer, experts)
        tensors = {name: shape for name, (shape, _) in parts.items()}
        if experts:
            tensors |= of_router(model) | of_experts(model)
        if tuning is not None:
            matrices = parts | (expert_splits(model) if experts else {})
            tensors |= {name: shape for name, (shape, _) in tuning.adapters(block, matrices).items()}
        yield from ((f"{block}.{name}", shape) for name, shape in tensors.items())
    if model.mtp_depth:
        yield from ((f"mtp.0.{name}.weight", norm) for name in ("hidden_norm", "embed_norm", "norm"))
        yield "mtp.0.project.weight", (model.dim, 2 * model.dim)
    yield "head.norm.weight", norm
    if not model.tie_embeddings:
        yield "head.weight", ends


def names(model: Model) -> list[str]:
    return [name for name, _ in shapes(model)]


def stored_name(name: str, tied: bool) -> str:
    """The name in checkpoints: the embedding and its copies on the last pipeline stage are one tensor there."""
    return "embed.weight" if name == "embed_copy.weight" or (tied and name == "head.weight") else name


# ---- which are trained


@lru_cache(maxsize=1 << 16)
def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Tuning(NamedTuple):
    """Which parameters a recipe trains."""

    freeze: tuple[str, ...] = ()
    rank: int = 0
    experts_rank: int = 0
    targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Tuning:
        lora = config.lora
        if not lora.rank:
            return cls(tuple(config.training.freeze))
        experts_rank = lora.experts_rank if lora.experts_rank > 0 else max(1, lora.rank // config.model.top_k)
        return cls((), lora.rank, experts_rank, tuple(lora.targets) or ("*",))

    @property
    def trains_all(self) -> bool:
        return not self.freeze and not self.rank

    def freezes(self, name: str) -> bool:
        """name: as checkpoints have it."""
        return ADAPTER not in name if self.rank else bool(self.freeze) and matches(name, self.freeze)

    def rank_of(self, name: str) -> int:
        """Of the adapters of a matrix; 0 if it has none."""
        if not self.rank or not is_adaptable(name) or not matches(name, self.targets):
            return 0
        return self.experts_rank if ".experts." in name else self.rank

    def adapters(self, block: str, matrices: Mapping[str, Split]) -> dict[str, Split]:
        """Of the matrices of a block, (outputs, inputs) or with the experts before these: A and B of each."""
        out: dict[str, Split] = {}
        for name, (shape, dim) in matrices.items():
            if rank := self.rank_of(f"{block}.{name}"):
                *experts, outputs, inputs = shape
                last = len(experts) + 1
                down, up = adapter_names(name)
                out[down] = (*experts, rank, inputs), last if dim == last else None
                out[up] = (*experts, outputs, rank), last - 1 if dim == last - 1 else None
        return out


ADAPTER = "lora_"
MATRICES = ("w1", "w2", "w3")


def is_adaptable(name: str) -> bool:
    """Whether a parameter is a matrix that may have adapters: of attention, a feed-forward network or an expert."""
    kind, _, leaf = name.removesuffix(".weight").rpartition(".")
    if kind.endswith(".attention"):
        return leaf.startswith("w") and name.endswith(".weight")
    return kind.endswith((".ffn", ".shared", ".experts")) and leaf in MATRICES


def adapter_names(name: str) -> tuple[str, str]:
    """Of a matrix's A and B. Experts' matrices are no modules, so the names are longer ones beside theirs."""
    base = f"{name.removesuffix('.weight')}." if name.endswith(".weight") else f"{name}_"
    return f"{base}{ADAPTER}A", f"{base}{ADAPTER}B"


EXPERT_SPLITS = {"w1": 1, "w3": 1, "w2": 2}
"""The dim of an expert's matrices that etp divides: the hidden one."""


def expert_splits(model: Model) -> dict[str, Split]:
    """The experts' matrices, and the dim of each that etp divides."""
    shapes = of_experts(model)
    return {f"moe.experts.{name}": (shapes[f"moe.experts.{name}"], dim) for name, dim in EXPERT_SPLITS.items()}


def contradictions(config: Config) -> Iterator[Violation]:
    patterns, lora = config.training.freeze, config.lora
    if not lora.rank:
        for name in ("targets", "experts_rank", "alpha"):
            if (value := getattr(lora, name)) != getattr(LoRA(), name):
                yield Violation(
                    (f"lora.{name}", "lora.rank"),
                    f"lora.{name} = {value} does nothing with lora.rank = 0, which makes no adapters: set rank, such "
                    f"as 16, or leave {name} out",
                )
        if folder := config.checkpoint.initial_adapter:
            yield Violation(
                ("checkpoint.initial_adapter", "lora.rank"),
                f'checkpoint.initial_adapter = "{folder}" begins from adapters, and lora.rank = 0 makes none: set the '
                "rank that they have, or leave initial_adapter out",
            )
    if not patterns and not lora.rank:
        return
    table = "lora.rank" if lora.rank else "training.freeze"
    if unnamed := next((mixer for mixer in mixers(config.model) if not mixer.names(config.model)), None):
        yield Violation(
            (table, "model.family"),
            f"{table} goes by the names of parameters, and the rules of the {unnamed.name} of model.family = "
            f'"{config.model.family}" do not state them: add `names` there (docs/extending.md), or leave {table} out',
        )
        return
    everything = names(config.model)
    yield from unmatched("training.freeze", patterns, everything)
    if lora.rank:
        yield from _lora(config, [name for name in everything if is_adaptable(name)])
    elif all(matches(name, tuple(patterns)) for name in everything):
        yield Violation(
            ("training.freeze",),
            f"training.freeze freezes all {len(everything)} parameters, and nothing is left to train: leave some out",
        )


def unmatched(field: str, patterns: Sequence[str], known: list[str]) -> Iterator[Violation]:
    if unmatched := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)]:
        layers = [name.split(".")[1] for name in known if name.startswith("layers.")]
        own = f"layers.{layers[-1] if layers else 0}."
        shown = [name.replace(own, "layers.*.") for name in known if name.startswith(own) or "layers" not in name]
        listed = " and ".join(f'"{pattern}"' for pattern in unmatched)
        yield Violation(
            (field, "model.family"),
            f"{field} has {listed}, which {'is' if len(unmatched) == 1 else 'are'} the name of nothing there: choose "
            f"from {', '.join(shown)}",
        )


def _lora(config: Config, adaptable: list[str]) -> Iterator[Violation]:
    lora, freeze = config.lora, config.training.freeze
    yield from unmatched("lora.targets", lora.targets, adaptable)
    yield from _high_rank(config)
    if freeze:
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


def _high_rank(config: Config) -> Iterator[Violation]:
    """Refuse a rank that is above that of every matrix which has such adapters."""
    tuning = Tuning.of(config)
    for field, rank, of_experts in (
        ("lora.rank", tuning.rank, False),
        ("lora.experts_rank", tuning.experts_rank, True),
    ):
        sides = [
            min(shape[-2:])
            for name, shape in shapes(config.model)
            if tuning.rank_of(name) and (".experts." in name) == of_experts
        ]
        if sides and rank > max(sides):
            derived = " (-1: lora.rank // model.top_k)" if of_experts and config.lora.experts_rank == -1 else ""
            yield Violation(
                (field, "model.family"),
                f"{field} = {rank}{derived} exceeds {max(sides)}, the smaller side of the largest matrix "
                f"that it adapts: more than {max(sides)} changes it no further: use at most that",
            )
            return
