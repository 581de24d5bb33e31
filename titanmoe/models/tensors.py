"""List the parameters of a model by name, with shape and sharding, and which of them a recipe trains. No torch here.

The parallel plan, the planner and converters read the same list. A Split is a parameter's full shape, and the dim that
tp shards (of routed experts: etp), which is None for a replicated parameter.
"""

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
    """Return the full shape and the dim that tp shards of "w1.weight" (gate), "w3.weight" (up), "w2.weight" (down)."""
    return {"w1.weight": ((hidden, dim), 0), "w3.weight": ((hidden, dim), 0), "w2.weight": ((dim, hidden), 1)}


def with_prefix(prefix: str, tensors: dict[str, Split]) -> dict[str, Split]:
    """Return the dict with the prefix and a dot put before each name."""
    return {f"{prefix}.{name}": split for name, split in tensors.items()}


def block_splits(model: Model, mixer: MixerSpec, experts: bool, tp: int = 1) -> dict[str, Split]:
    """Return the full shape, and the dim that tp shards, of a block's parameters without its router and routed experts.

    These are the parameters that FSDP shards over attention's data ranks, without adapters. Where a family's `plan` has
    a parameter, it says the dim. Names are those within the block.

    Args:
        experts: whether the block has routed experts instead of a dense network.
        tp: number of ranks of tensor parallel. Parameters that so many ranks cannot shard, such as keys where tp
            exceeds the number of key heads, have the dim None.
    """
    norm: Split = ((model.dim,), None)
    tensors = {"attention_norm.weight": norm, "ffn_norm.weight": norm}
    tensors |= with_prefix("attention", mixer.parameters(model))
    if not experts:
        tensors |= with_prefix("ffn", swiglu(model.dim, model.dense_hidden))
    elif model.shared_hidden:
        tensors |= with_prefix("moe.shared", swiglu(model.dim, model.shared_hidden))
        tensors |= {"moe.shared.gate.weight": ((1, model.dim), None)} if model.shared_gate else {}
    for pattern, dim in family_of(model.family).plan.items():
        tensors |= {name: (shape, dim) for name, (shape, _) in tensors.items() if matches(name, (pattern,))}
    replicated = tuple(f"attention.{module}.*" for module, ranks in mixer.max_tp(model).items() if tp > ranks)
    return {name: (shape, None if matches(name, replicated) else dim) for name, (shape, dim) in tensors.items()}


def router_splits(model: Model) -> dict[str, Split]:
    """Return the shape of a router's parameters, by name within the block; the dim of each is None.

    Every rank of a pipeline stage has a replica of them. `expert_bias`, which is a buffer, is not among them.
    """
    bias: dict[str, Split] = {"moe.router.bias": ((model.num_experts,), None)} if model.router_bias else {}
    return {"moe.router.weight": ((model.num_experts, model.dim), None)} | bias


EXPERT_SPLITS = {"w1": 1, "w3": 1, "w2": 2}
"""Dim that etp shards, by matrix of the stacked experts: the hidden width F of (E, F, D) or (E, D, F)."""


def expert_splits(model: Model) -> dict[str, Split]:
    """Return the full shape, and the dim that etp shards, of the routed experts' parameters, by name within the block.

    ep shards dim 0, the experts. Of w2's bias (E, D) etp shards the model dim D: w2's outputs are summed over etp, and
    so each element of the bias is added by one rank alone.
    """
    experts, hidden, dim = model.num_experts, model.expert_hidden, model.dim
    shapes: dict[str, Shape] = dict.fromkeys(EXPERT_SPLITS, (experts, hidden, dim)) | {"w2": (experts, dim, hidden)}
    tensors: dict[str, Split] = {name: (shapes[name], split) for name, split in EXPERT_SPLITS.items()}
    if model.expert_linear_bias:
        tensors |= {f"{name}_bias": (shape[:2], 1) for name, shape in shapes.items()}
    return with_prefix("moe.experts", tensors)


def expert_data_dim(name: str) -> int:
    """Return the dim of a stacked expert parameter that FSDP shards where edp does not divide the local experts.

    It is the model dim D of w1 and w3, (E, F, D), and of w2, (E, D, F); the width of a bias, (E, width); and of an
    adapter's A or B the dim that is neither the experts nor the rank.

    Args:
        name: name of the parameter within the experts' module, such as "w1".
    """
    return lora_spec.shared_dim(name) if lora_spec.is_adapter(name) else 2 if name in ("w1", "w3") else 1


def layer_splits(model: Model, layer: int, mixer: MixerSpec, tuning: Tuning) -> dict[str, Split]:
    """Return the full shape, and the dim that tp (of experts: etp) shards, of all parameters of a block.

    Router, experts and, where `tuning` has them, adapters are included. Names are those within the block. The degree of
    tp is not looked at: parameters that a large one replicates (`max_tp`) have their dims too.
    """
    experts = has_experts(model, layer)
    tensors = block_splits(model, mixer, experts)
    if experts:
        tensors |= router_splits(model) | expert_splits(model)
    return tensors | tuning.adapters(block_name(model, layer), tensors)


VOCABULARY = ("embed.weight", "head.weight")
"""The parameters with a row for each id; parallelism.vocab says over which ranks the rows are sharded."""


def edge_splits(model: Model, first: bool = True, last: bool = True) -> dict[str, Split]:
    """Return the full shape, and the dim that tp shards, of a stage's parameters outside blocks, by name.

    A tied head is among them, also beside its embedding.

    Args:
        first: whether the stage begins with the embedding.
        last: whether the stage ends with the head, and multi-token prediction if the model has it. The latter needs a
            copy of the embedding, "embed_copy.weight", where the stage is not the first.
    """
    vocabulary: Split = ((model.vocab_size, model.dim), 0)
    norm: Split = ((model.dim,), None)
    tensors = {"embed.weight": vocabulary} if first else {}
    if last and model.mtp_depth:
        tensors |= {f"mtp.0.{name}.weight": norm for name in ("hidden_norm", "embed_norm", "norm")}
        tensors["mtp.0.project.weight"] = (model.dim, 2 * model.dim), None
        tensors |= {} if first else {"embed_copy.weight": vocabulary}
    return tensors | ({"head.norm.weight": norm, "head.weight": vocabulary} if last else {})


def block_name(model: Model, layer: int) -> str:
    """Return the path of a block's module, such as "layers.3"; "mtp.0.block" for the number after the last layer's."""
    return f"layers.{layer}" if layer < model.num_layers else "mtp.0.block"


def shapes(model: Model, tuning: Tuning | None = None) -> Iterator[tuple[str, Shape]]:
    """Yield (name, full shape) of all parameters as checkpoints store them: a tied head is not among them.

    `tuning` says which matrices have adapters, to be included; None for a model without adapters.
    """
    ends = edge_splits(model)
    yield "embed.weight", ends.pop("embed.weight")[0]
    for layer, mixer in enumerate(mixers(model)):
        block = block_name(model, layer)
        splits = layer_splits(model, layer, mixer, tuning or Tuning())
        yield from ((f"{block}.{name}", shape) for name, (shape, _) in splits.items())
    if model.tie_embeddings:
        del ends["head.weight"]
    yield from ((name, shape) for name, (shape, _) in ends.items())


def names(model: Model) -> list[str]:
    """Return the names of all parameters as checkpoints store them, without adapters."""
    return [name for name, _ in shapes(model)]


def stored_name(name: str, tied: bool) -> str:
    """Return the name under which checkpoints store a parameter.

    It is the parameter's own name, but "embed.weight" for a copy of the embedding, and for the head if `tied`.
    """
    return "embed.weight" if name == "embed_copy.weight" or (tied and name == "head.weight") else name


# ---- which are trained


@lru_cache(maxsize=1 << 16)
def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name matches any of these shell patterns, whose `*` and `?` match dots too. Caches."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Tuning(NamedTuple):
    """The choice of parameters that a recipe trains."""

    freeze: tuple[str, ...] = ()
    """Shell patterns of frozen parameters' names; unused with adapters, which freeze all other parameters."""
    rank: int = 0
    """Rank of the adapters outside routed experts; 0 if the recipe trains no adapters."""
    experts_rank: int = 0
    """Rank of the routed experts' adapters."""
    targets: tuple[str, ...] = ()
    """Shell patterns of the names of matrices that have adapters."""

    @classmethod
    def of(cls, config: Config) -> Tuning:
        """Return the choice that a recipe makes by training.freeze and [lora].

        Without lora.targets all matrices that may have adapters have them. Without lora.experts_rank the rank for
        experts is lora.rank // model.top_k, at least 1.
        """
        lora = config.lora
        if not lora.rank:
            return cls(tuple(config.training.freeze))
        experts_rank = lora.experts_rank if lora.experts_rank > 0 else max(1, lora.rank // config.model.top_k)
        return cls((), lora.rank, experts_rank, tuple(lora.targets) or ("*",))

    @property
    def trains_all(self) -> bool:
        """Whether all parameters are trained, without adapters."""
        return not self.freeze and not self.rank

    def freezes(self, name: str) -> bool:
        """Return whether the recipe freezes the parameter that has this name in checkpoints."""
        return not lora_spec.is_adapter(name) if self.rank else bool(self.freeze) and matches(name, self.freeze)

    def rank_of(self, name: str) -> int:
        """Return the rank of the adapters of the matrix with this name in checkpoints; 0 if it has no adapters."""
        if not self.rank or not lora_spec.is_adaptable(name) or not matches(name, self.targets):
            return 0
        return self.experts_rank if ".experts." in name else self.rank

    def adapters(self, block: str, matrices: Mapping[str, Split]) -> dict[str, Split]:
        """Return the full shape, and the sharded dim, of each adapter parameter (A or B) of a block.

        Args:
            block: path of the block, such as "layers.3".
            matrices: shape and sharded dim of the block's parameters, by name within the block, as in the result.
        """
        out: dict[str, Split] = {}
        for name, split in matrices.items():
            if rank := self.rank_of(f"{block}.{name}"):
                out |= lora_spec.adapter_splits(name, split, rank)
        return out


def contradictions(config: Config) -> Iterator[Violation]:
    """Yield a Violation for each option of training.freeze and [lora] that contradicts the model or another option.

    Such are patterns that match no parameter (also those of a family's `plan`) or, in lora.targets, no matrix that may
    have adapters; options of adapters without lora.rank; options that adapters exclude; and a freeze of all parameters.
    """
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
        adaptable = list(filter(lora_spec.is_adaptable, everything))
        routers = [name for name in everything if ".router." in name]
        wrong = unmatched_patterns(lora.targets, adaptable)
        of_routers = [p for p in wrong if not unmatched_patterns([p], routers)]
        absent = unmatched_patterns(wrong, everything)
        others = [p for p in wrong if p not in (*of_routers, *absent)]
        yield from lora_spec.of_routers(of_routers)
        yield from unmatched("lora.targets", absent, adaptable)
        yield from unmatched("lora.targets", others, adaptable, "whose parameters cannot have adapters")
        yield from lora_spec.contradictions(config, Tuning.of(config), everything)
    elif all(matches(name, tuple(patterns)) for name in everything):
        yield Violation(
            ("training.freeze",),
            f"training.freeze freezes all {len(everything)} parameters, and nothing is left to train: leave some out",
        )


def unmatched_patterns(patterns: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the shell patterns that match none of the known names."""
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)]


def unmatched(field: str, patterns: Sequence[str], known: Collection[str], problem: str = "") -> Iterator[Violation]:
    """Yield one Violation that lists the patterns that match none of the known names; nothing if all match.

    It also lists names to choose from: those of one layer, as "layers.*.", and those outside layers.

    Args:
        field: path of the option that has the patterns, such as "training.freeze".
        patterns: shell patterns of parameters' names.
        known: the names that a pattern may match.
        problem: what the message says of the patterns; "" for "which match no parameter".
    """
    if unmatched := unmatched_patterns(patterns, known):
        layers = [name.split(".")[1] for name in known if name.startswith("layers.")]
        prefix = f"layers.{layers[-1] if layers else 0}."
        shown = [name.replace(prefix, "layers.*.") for name in known if name.startswith(prefix) or "layers" not in name]
        problem = problem or f"which {'matches' if len(unmatched) == 1 else 'match'} no parameter"
        listed = " and ".join(f'"{pattern}"' for pattern in unmatched)
        yield Violation((field, "model.family"), f"{field} has {listed}, {problem}: choose from {', '.join(shown)}")
