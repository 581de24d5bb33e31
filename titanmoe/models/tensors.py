"""The parameters of a model, by name, from its shape alone; and which of them a recipe freezes. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from titanmoe.config.blocks import has_experts
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config, Model
from titanmoe.models import lora_spec
from titanmoe.models.families import family_of, mixers
from titanmoe.models.mixers.mixer_spec import MixerSpec, Shape, Split


def swiglu(dim: int, hidden: int) -> dict[str, Split]:
    return {"w1.weight": ((hidden, dim), 0), "w3.weight": ((hidden, dim), 0), "w2.weight": ((dim, hidden), 1)}


def under(prefix: str, tensors: dict[str, Split]) -> dict[str, Split]:
    return {f"{prefix}.{name}": split for name, split in tensors.items()}


def of_block(model: Model, mixer: MixerSpec, experts: bool, tp: int = 1) -> dict[str, Split]:
    """Return shape and tp's dim of a block's parameters that are sharded over attention's data ranks: of all but its
    router and its experts."""
    norm: Split = ((model.dim,), None)
    tensors = {"attention_norm.weight": norm, "ffn_norm.weight": norm}
    tensors |= under("attention", mixer.parameters(model))
    if not experts:
        tensors |= under("ffn", swiglu(model.dim, model.dense_hidden))
    elif model.shared_hidden:
        tensors |= under("moe.shared", swiglu(model.dim, model.shared_hidden))
        tensors |= {"moe.shared.gate.weight": ((1, model.dim), None)} if model.shared_gate else {}
    for pattern, dim in family_of(model.family).plan.items():
        tensors |= {name: (shape, dim) for name, (shape, _) in tensors.items() if matches(name, (pattern,))}
    whole = tuple(f"attention.{module}.*" for module, ranks in mixer.up_to(model).items() if tp > ranks)
    return {name: (shape, None if matches(name, whole) else dim) for name, (shape, dim) in tensors.items()}


def of_router(model: Model) -> dict[str, Split]:
    """Return shape and dim (none) of a router's parameters: every rank of a stage has all of them."""
    bias: dict[str, Split] = {"moe.router.bias": ((model.num_experts,), None)} if model.router_bias else {}
    return {"moe.router.weight": ((model.num_experts, model.dim), None)} | bias


EXPERT_SPLITS = {"w1": 1, "w3": 1, "w2": 2}
"""The dim of an expert's matrices that etp divides: the hidden one."""


def of_experts(model: Model) -> dict[str, Split]:
    """Return shape and etp's dim of the experts' parameters; ep divides dim 0. Of the last bias etp divides the model
    dim, because otherwise every rank of etp would add it."""
    experts, hidden, dim = model.num_experts, model.expert_hidden, model.dim
    shapes: dict[str, Shape] = dict.fromkeys(EXPERT_SPLITS, (experts, hidden, dim)) | {"w2": (experts, dim, hidden)}
    tensors: dict[str, Split] = {name: (shapes[name], split) for name, split in EXPERT_SPLITS.items()}
    if model.expert_biases:
        tensors |= {f"{name}_bias": (shape[:2], 1) for name, shape in shapes.items()}
    return under("moe.experts", tensors)


def expert_data_dim(name: str) -> int:
    """Return the dim of an experts' parameter that data ranks divide where they do not divide the experts: D of w1 and
    w3, (E, F, D), D of w2, (E, D, F), the only width of a bias; of adapters the dim that is not the rank."""
    return lora_spec.shared_dim(name) if lora_spec.is_adapter(name) else 2 if name in ("w1", "w3") else 1


def of_layer(model: Model, layer: int, mixer: MixerSpec, tuning: Tuning) -> dict[str, Split]:
    """Return shape and sharded dim of all parameters of a block, by name, with its adapters."""
    experts = has_experts(model, layer)
    tensors = of_block(model, mixer, experts)
    if experts:
        tensors |= of_router(model) | of_experts(model)
    return tensors | tuning.adapters(block_name(model, layer), tensors)


def of_ends(model: Model, first: bool = True, last: bool = True) -> dict[str, Split]:
    """Return shape and tp's dim of the parameters that a pipeline's first and last stage have beside blocks."""
    vocabulary: Split = ((model.vocab_size, model.dim), 0)
    norm: Split = ((model.dim,), None)
    tensors = {"embed.weight": vocabulary} if first else {}
    if last and model.mtp_depth:
        tensors |= {f"mtp.0.{name}.weight": norm for name in ("hidden_norm", "embed_norm", "norm")}
        tensors["mtp.0.project.weight"] = (model.dim, 2 * model.dim), None
        tensors |= {} if first else {"embed_copy.weight": vocabulary}
    return tensors | ({"head.norm.weight": norm, "head.weight": vocabulary} if last else {})


def block_name(model: Model, layer: int) -> str:
    return f"layers.{layer}" if layer < model.num_layers else "mtp.0.block"


def shapes(model: Model, tuning: Tuning | None = None) -> Iterator[tuple[str, Shape]]:
    """Of all parameters, by their names in checkpoints: a tied embedding and its copies are one. tuning: brings
    adapters."""
    ends = of_ends(model)
    yield "embed.weight", ends.pop("embed.weight")[0]
    for layer, mixer in enumerate(mixers(model)):
        block = block_name(model, layer)
        splits = of_layer(model, layer, mixer, tuning or Tuning())
        yield from ((f"{block}.{name}", shape) for name, (shape, _) in splits.items())
    if model.tie_embeddings:
        del ends["head.weight"]
    yield from ((name, shape) for name, (shape, _) in ends.items())


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
        return not lora_spec.is_adapter(name) if self.rank else bool(self.freeze) and matches(name, self.freeze)

    def rank_of(self, name: str) -> int:
        """Of the adapters of a matrix; 0 if it has none."""
        if not self.rank or not lora_spec.is_adaptable(name) or not matches(name, self.targets):
            return 0
        return self.experts_rank if ".experts." in name else self.rank

    def adapters(self, block: str, matrices: Mapping[str, Split]) -> dict[str, Split]:
        """Return shape and sharded dim of A and B of those of a block's matrices that have them."""
        out: dict[str, Split] = {}
        for name, split in matrices.items():
            if rank := self.rank_of(f"{block}.{name}"):
                out |= lora_spec.adapter_splits(name, split, rank)
        return out


def contradictions(config: Config) -> Iterator[Violation]:
    patterns, lora, rows = config.training.freeze, config.lora, family_of(config.model.family).plan
    if rows:
        yield from unmatched("model.family", [f"*.{row}" for row in rows], dict(shapes(config.model)))
    if not lora.rank:
        yield from lora_spec.without_rank(config)
    if not patterns and not lora.rank:
        return
    everything = dict(shapes(config.model))
    yield from unmatched("training.freeze", patterns, everything)
    if lora.rank:
        yield from unmatched("lora.targets", lora.targets, list(filter(lora_spec.is_adaptable, everything)))
        yield from lora_spec.contradictions(config, Tuning.of(config), everything)
    elif all(matches(name, tuple(patterns)) for name in everything):
        yield Violation(
            ("training.freeze",),
            f"training.freeze freezes all {len(everything)} parameters, and nothing is left to train: leave some out",
        )


def unmatched(field: str, patterns: Sequence[str], known: Collection[str]) -> Iterator[Violation]:
    """Refuse patterns that match none of the known names."""
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
