"""Weights of a rank, exactly: shapes after tp and etp, what FSDP shards, adapters, and optimizer state.

Elements, not bytes, unless it says so. A unit is what FSDP gathers and reduces at once: a block without its routed
experts, these experts, the embedding, or the head with its norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from titanmoe.config.blocks import has_experts
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config, Model
from titanmoe.fold.degrees import Fold
from titanmoe.models import tensors
from titanmoe.models.families import mixers
from titanmoe.models.mixers.mixer_spec import MixerSpec, Shape, Split
from titanmoe.models.tensors import Tuning, block_name, block_splits, expert_splits
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS

EVERYTHING = Tuning()


@dataclass(frozen=True)
class WeightUnit:
    """Tensors that FSDP gathers and reduces together, with their shapes on a rank after tp, ep and etp."""

    shapes: tuple[Shape, ...]
    dims: tuple[int, ...]
    """Dim of each tensor that FSDP shards."""
    replicated: tuple[int, ...] = ()
    """Elements of each tensor that every data rank holds in full, outside FSDP: the router's."""
    frozen: tuple[bool, ...] = ()
    """Whether each tensor is frozen, the sharded ones first; empty if all are trained."""

    @cached_property
    def trained(self) -> WeightUnit:
        """The unit without its frozen tensors."""
        if not any(self.frozen):
            return self
        count = len(self.shapes)
        trained_indices = [i for i in range(count) if not self.frozen[i]]
        replicated = tuple(n for n, off in zip(self.replicated, self.frozen[count:], strict=True) if not off)
        shapes, dims = tuple(self.shapes[i] for i in trained_indices), tuple(self.dims[i] for i in trained_indices)
        return WeightUnit(shapes, dims, replicated)

    @cached_property
    def full_size(self) -> int:
        """Elements that a rank has after FSDP's gather: still divided by tp, ep and etp, and without the router."""
        return sum(map(prod, self.shapes))

    @cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.dims, self.replicated, self.frozen))

    def __hash__(self) -> int:
        return self._hash

    @lru_cache(maxsize=65536)  # noqa: B019  (a unit is a value, and few are ever made)
    def shard_size(self, ranks: int, index: int = 0) -> int:
        """Return the elements that data rank `index` of `ranks` stores; the first stores the most.

        Replicated tensors count in full. Uneven dims are sharded as torch.chunk does.
        """
        total = sum(self.replicated)
        for shape, dim in zip(self.shapes, self.dims, strict=True):
            size = shape[dim]
            each = -(-size // ranks)
            total += prod(shape) // size * max(0, min(each, size - index * each))
        return total

    def sharded_size(self, ranks: int) -> int:
        """Return the elements that the first of `ranks` data ranks stores of the sharded tensors."""
        return self.shard_size(ranks) - sum(self.replicated)

    def stored_bytes(self, ranks: int, width: int) -> int:
        """Return the bytes that the first of `ranks` data ranks stores, replicated tensors included.

        `width` is the bytes of a number; those of routers have at least 4.
        """
        wide = sum(self.replicated)
        return (self.shard_size(ranks) - wide) * width + wide * max(width, 4)

    def __len__(self) -> int:
        return len(self.shapes) + len(self.replicated)


def _unit(tp: int, splits: list[Split], replicated: tuple[int, ...] = (), frozen: tuple[bool, ...] = ()) -> WeightUnit:
    """Return a rank's unit of tensors that tp may divide, and FSDP shards along dim 0.

    Args:
        splits: full shape of each tensor, and the dim that tp divides; None if it divides none.
        replicated: elements of each tensor that every data rank holds in full.
        frozen: whether each tensor is frozen, replicated ones last; empty if all are trained.
    """
    shapes = tuple(tuple(n // tp if dim == i else n for i, n in enumerate(shape)) for shape, dim in splits)
    return WeightUnit(shapes, (0,) * len(shapes), replicated, frozen)


class ModelKey:
    """Hashable key of a model's options, so that functions of a model can be cached.

    Models are not hashable, and hashing their fields each time is slow.
    """

    _cache: dict[tuple, ModelKey] = {}

    def __init__(self, model: Model):
        self.model = model

    @cached_property
    def mixers(self) -> list[MixerSpec]:
        return mixers(self.model)

    @classmethod
    def of(cls, model: Model) -> ModelKey:
        """Return the key of a model; models with equal options have the same object.

        `change` and `media_tokens`, which change no weight, are not compared.
        """
        values = vars(model) | {"own": tuple(model.own.items()), "change": (), "media_tokens": ()}
        return cls._cache.setdefault(tuple(values.values()), cls(model))


def _flags(names: Iterable[str], tuning: Tuning) -> tuple[bool, ...]:
    """Return whether each of the parameters `names` is frozen; () if `tuning` freezes nothing in the model."""
    return () if tuning.trains_all else tuple(map(tuning.freezes, names))


@lru_cache(maxsize=4096)
def _block(key: ModelKey, tp: int, layer: int, tuning: Tuning) -> WeightUnit:
    """Return the unit of block `layer` on a rank, after tp, adapters included and routed experts left out.

    The router is among its replicated tensors, the shared expert among those that FSDP shards. `tuning` decides which
    adapters it has, and which of its tensors are frozen.
    """
    model, mixer, experts = key.model, key.mixers[layer], has_experts(key.model, layer)
    splits, router = tensors.block_splits(model, mixer, experts, tp), tensors.router_splits(model) if experts else {}
    block = tensors.block_name(model, layer)
    splits |= tuning.adapters(block, splits)
    frozen = _flags((f"{block}.{name}" for name in (*splits, *router)), tuning)
    return _unit(tp, list(splits.values()), tuple(prod(shape) for shape, _ in router.values()), frozen)


@lru_cache(maxsize=4096)
def _experts(key: ModelKey, ep: int, etp: int, edp: int, layer: int = 0, tuning: Tuning = EVERYTHING) -> WeightUnit:
    """Return the unit of one block's experts and their adapters on a rank, after ep and etp.

    Args:
        edp: data ranks that share the experts. It sets the dim that FSDP shards, not the shapes: the experts if edp
            divides their number on a rank, else a dim of each matrix.
        layer: index of the block; matters only if some tensors are frozen or adapted.
    """
    model, block = key.model, tensors.block_name(key.model, layer)
    splits = tensors.expert_splits(model)
    splits |= tuning.adapters(block, splits)
    shapes = [tuple(n // etp if i == dim else n for i, n in enumerate(shape)) for shape, dim in splits.values()]
    shapes = [(model.num_experts // ep, *shape[1:]) for shape in shapes]
    dims = tuple(tensors.expert_data_dim(name.rpartition(".")[2]) for name in splits)
    frozen = _flags((f"{block}.{name}" for name in splits), tuning)
    # Full experts to each data rank if they divide evenly, else slices of a width: titanmoe.parallel.data_parallel.
    uneven = model.num_experts // ep % edp
    return WeightUnit(tuple(shapes), dims if uneven else (0,) * len(shapes), (), frozen)


@lru_cache(maxsize=4096)
def _first_equal_block(key: ModelKey, layer: int) -> int:
    """Return the index of the first block with the same mixer and kind of feed-forward network as block `layer`."""
    kinds = [(mixer, has_experts(key.model, i)) for i, mixer in enumerate(key.mixers)]
    return kinds.index(kinds[layer])


class Sizes:
    """Weight units of a model on a rank of a mapping."""

    def __init__(self, model: Model, fold: Fold, tuning: Tuning = EVERYTHING, vocabulary: int = 0):
        """Make the units `embedding`, `head` (with the norm before it) and `experts`.

        `experts` has no adapters and nothing frozen, whatever `tuning` is; `experts_of` has both.

        Args:
            fold: degrees, of which tp, ep, etp and edp matter.
            vocabulary: ranks that shard the vocabulary, whose rows per rank are rounded up; 0 for those of tp.
        """
        self.model, self.tuning = model, tuning
        self._key = ModelKey.of(model)
        self._tp, self._of_experts = fold.tp, (fold.ep, fold.etp, fold.edp)
        self.experts = _experts(self._key, *self._of_experts)
        dim, split = model.dim, -(-model.vocab_size // (vocabulary or fold.tp))
        ends = "head.norm.weight", tensors.stored_name("head.weight", model.tie_embeddings)
        self.embedding = WeightUnit(((split, dim),), (0,), (), _flags(["embed.weight"], self.tuning))
        self.head = WeightUnit(((dim,), (split, dim)), (0, 0), (), _flags(ends, self.tuning))

    def block(self, layer: int) -> WeightUnit:
        """Return the unit of block `layer` without its routed experts; router and shared expert are in it."""
        # Without anything frozen, blocks that are alike are one unit.
        first = _first_equal_block(self._key, layer) if self.tuning.trains_all else layer
        return _block(self._key, self._tp, first, self.tuning)

    def experts_of(self, layer: int) -> WeightUnit:
        """Return the unit of the experts of MoE block `layer`, with the frozen tensors and adapters of that block."""
        return self.experts if self.tuning.trains_all else _experts(self._key, *self._of_experts, layer, self.tuning)

    @property
    def multi_token(self) -> WeightUnit:
        """Unit of the three norms and the projection of multi-token prediction, without its block; tp divides none."""
        dim = self.model.dim
        frozen = _flags((f"mtp.0.{n}.weight" for n in ("hidden_norm", "embed_norm", "norm", "project")), self.tuning)
        return _unit(1, [((dim,), None)] * 3 + [((dim, 2 * dim), None)], (), frozen)


class StageLayers(NamedTuple):
    """The layers of a pipeline stage, and whether it is the first or the last."""

    layers: range
    is_first: bool
    """Whether it has the embedding."""
    is_last: bool
    """Whether it has the head, and so the blocks of multi-token prediction."""

    def blocks(self, model: Model) -> list[int]:
        """Return the indices of the stage's blocks, those of multi-token prediction included."""
        return [*self.layers, *range(model.num_layers, model.num_layers + model.mtp_depth * self.is_last)]


def units_of_stage(config: Config, sizes: Sizes, stage: StageLayers) -> list[WeightUnit]:
    """Return the weight units of a stage without experts.

    A tied head's matrix is left out if the stage has the embedding, and so is a vocabulary that all stages share
    (`shared_vocabulary`). For multi-token prediction the last of several stages has a copy of the embedding.
    """
    model, shared = config.model, config.parallelism.vocab == "pipeline"
    units = [sizes.block(layer) for layer in stage.blocks(model)]
    if stage.is_last and model.mtp_depth:
        units += [sizes.multi_token] + [sizes.embedding] * (not stage.is_first and not shared)
    if stage.is_first and not shared:
        units.append(sizes.embedding)
    if stage.is_last:
        tied = shared or (model.tie_embeddings and stage.is_first)
        units.append(WeightUnit(((model.dim,),), (0,), (), sizes.head.frozen[:1]) if tied else sizes.head)
    return units


def shared_vocabulary(config: Config, sizes: Sizes) -> list[WeightUnit]:
    """Return the units of embedding and head on a rank if all stages share them (vocab = "pipeline"), else [].

    The embedding alone if they are tied; the head without its norm.
    """
    if config.parallelism.vocab != "pipeline":
        return []
    if config.model.tie_embeddings:
        return [sizes.embedding]
    head = sizes.head
    return [sizes.embedding, WeightUnit(head.shapes[1:], (0,), (), head.frozen[1:])]


def vocabulary_ranks(config: Config, fold: Fold) -> int:
    """Return the number of ranks that shard the vocabulary: those of tp, with vocab = "pipeline" of tp x pp."""
    return fold.tp * (fold.pp if config.parallelism.vocab == "pipeline" else 1)


def fsdp(fold: Fold) -> int:
    """Return the number of ranks over which FSDP shards all weights but the experts': dp_shard x cp."""
    return fold.dp_shard * fold.cp


def microbatches(config: Config, fold: Fold) -> int:
    """Return the microbatches of a step on each data rank, rounded down; at least 1.

    `config` must have a global batch size.
    """
    return max(1, config.training.global_batch_size // (config.training.local_batch_size * fold.dp))


# ---- adapters

ADDED, KERNELS = 6, (4, 6)
"""Cost of an adapter beside its products: bytes moved, in 16 bits, per element to which its term is added (outputs; in
backward gradients of inputs), and kernels forward and backward: two narrow products, a scale and a sum; four products
and two sums."""
DROPPED, DROPPED_KERNELS = (72, 12), (20, 3)
"""Cost of dropout before an adapter: bytes moved, in 16 bits, per element of its input, and kernels, forward (most of
them draw random numbers) and backward. Counted in rehearsals (tests/plan/test_price.py); a compiler fuses them."""


class Adapter(NamedTuple):
    """A low-rank adapter on a matrix, as the planner prices it."""

    name: str
    """Name of its matrix A within the block."""
    rank: int
    inputs: int
    outputs: int
    inputs_split: bool
    """Whether tp or etp divides the inputs."""
    outputs_split: bool


def adapters_of(config: Config, layer: int, w: int) -> Iterator[Adapter]:
    """Yield the LoRA adapters of block `layer`, in full size, not divided by tp or etp; none without [lora].

    Args:
        w: bytes of the compute dtype, by which the experts' adapter ranks are filled up to a multiple of 16 bytes.
    """
    if not config.lora.rank:
        return
    model, experts = config.model, has_experts(config.model, layer)
    matrices = block_splits(model, mixers(model)[layer], experts) | (expert_splits(model) if experts else {})
    pairs = list(Tuning.of(config).adapters(block_name(model, layer), matrices).items())
    for (name, (a, a_dim)), (_, (b, b_dim)) in zip(pairs[::2], pairs[1::2], strict=True):
        filled = -a[-2] % (16 // w) if ".experts." in name else 0  # titanmoe.models.lora
        yield Adapter(name, a[-2] + filled, a[-1], b[-2], a_dim is not None, b_dim is not None)


# ---- optimizer state

ShardedUnits = list[tuple[WeightUnit, int]]
"""Units, each with the number of data ranks that shard it."""


def units_of_rank(
    config: Config, fold: Fold, sizes: Sizes, stages: list[StageLayers]
) -> tuple[ShardedUnits, ShardedUnits]:
    """Return the weight units of a rank's stages, those without experts and those of experts.

    Each has the number of data ranks that shard it. A vocabulary that all stages share is among the first.
    """
    dense = [unit for stage in stages for unit in units_of_stage(config, sizes, stage)]
    dense += shared_vocabulary(config, sizes)
    blocks = [i for stage in stages for i in stage.blocks(config.model) if has_experts(config.model, i)]
    return [(unit, fsdp(fold)) for unit in dense], [(sizes.experts_of(i), fold.edp) for i in blocks]


def state_bytes(config: Config, fold: Fold, units: ShardedUnits, stages: list[StageLayers]) -> int:
    """Return the bytes of the optimizer's state on a rank; frozen weights have none.

    Of uneven shards those of the first data rank count, which are the largest.

    Args:
        units: weight units of the rank, as `units_of_rank` returns them for `stages`, in one list.
        stages: the rank's stages, of which an optimizer with rules of its own for matrices (Muon) needs the names.
    """
    optimizer = OPTIMIZERS.look_up(config.optimizer.name)
    as_weights, width = WIDTHS[config.training.dtype], optimizer.moment_width(config)

    def numbers(units: ShardedUnits) -> int:
        """Return the bytes of one number of state for each trained weight."""
        if width < as_weights:  # routers' too, which are stored wider
            return sum(unit.trained.shard_size(n) for unit, n in units) * width
        return sum(unit.trained.stored_bytes(n, width) for unit, n in units)

    matrices, out = optimizer.matrices(config), 0
    if matrices:
        tuning = Tuning((*config.training.freeze, *matrices))
        sizes = Sizes(config.model, fold, tuning, vocabulary_ranks(config, fold))
        dense, experts = units_of_rank(config, fold, sizes, stages)
        rest = dense + experts
        out = optimizer.numbers_per_matrix_weight * (numbers(units) - numbers(rest))
        units = rest
    count = sum(len(unit.trained) for unit, _ in units)
    return out + optimizer.numbers_per_weight * numbers(units) + optimizer.bytes_per_tensor * count
