"""The weights of a rank, exactly: each matrix of the modules, how tp and etp split it, and what FSDP leaves of it.

Elements, not bytes. A unit is what FSDP gathers and reduces at once: a block without its experts, or its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Config, Model
from titanmoe.fold.degrees import Fold
from titanmoe.models.families import mixers
from titanmoe.models.mixers.rules import MixerRules, Shape, Split


@dataclass(frozen=True)
class WeightUnit:
    """The local pieces of its tensors after tp, ep and etp."""

    shapes: tuple[Shape, ...]
    dims: tuple[int, ...]
    """The dim of each that FSDP shards."""
    replicated: tuple[int, ...] = ()
    """Elements of its tensors that every data rank holds whole, outside FSDP: the router's."""

    @cached_property
    def whole(self) -> int:
        """What FSDP gathers."""
        return sum(map(prod, self.shapes))

    @cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.dims, self.replicated))

    def __hash__(self) -> int:
        return self._hash

    @lru_cache(maxsize=65536)  # noqa: B019  (a unit is a value, and few are ever made)
    def piece(self, parts: int, index: int = 0) -> int:
        """What one of the data ranks keeps; the first has the most. Uneven dims are cut as torch.chunk does."""
        total = sum(self.replicated)
        for shape, dim in zip(self.shapes, self.dims, strict=True):
            rows = shape[dim]
            each = -(-rows // parts)
            total += prod(shape) // rows * max(0, min(each, rows - index * each))
        return total

    def __len__(self) -> int:
        return len(self.shapes) + len(self.replicated)


def _unit(split: int, parts: list[Split], replicated: tuple[int, ...] = ()) -> WeightUnit:
    """parts: shape of each tensor, and the dim that `split` ranks divide among them, if any."""
    shapes = tuple(tuple(n // split if dim == i else n for i, n in enumerate(shape)) for shape, dim in parts)
    return WeightUnit(shapes, (0,) * len(shapes), replicated)


def _swiglu(dim: int, hidden: int) -> list[Split]:
    return [((hidden, dim), 0), ((hidden, dim), 0), ((dim, hidden), 1)]


class ModelKey:
    """A model as a cache key: models are not hashable, and hashing their fields each time is slow."""

    _cache: dict[tuple, ModelKey] = {}

    def __init__(self, model: Model):
        self.model = model

    @cached_property
    def mixers(self) -> list[MixerRules]:
        return mixers(self.model)

    @classmethod
    def of(cls, model: Model) -> ModelKey:
        values = vars(model) | {"own": tuple(model.own.items()), "change": ()}
        return cls._cache.setdefault(tuple(values.values()), cls(model))


@lru_cache(maxsize=4096)
def _block(key: ModelKey, tp: int, mixer: MixerRules, experts: bool) -> WeightUnit:
    model = key.model
    parts = [((model.dim,), None), ((model.dim,), None), *mixer.matrices(model)]
    parts += mixer.vectors(model) + mixer.norms(model)
    if not experts:
        return _unit(tp, [*parts, *_swiglu(model.dim, model.dense_hidden)])
    router = (model.num_experts * model.dim, *([model.num_experts] * model.router_bias))
    if model.shared_hidden:
        parts += _swiglu(model.dim, model.shared_hidden) + [((1, model.dim), None)] * model.shared_gate
    return _unit(tp, parts, router)


@lru_cache(maxsize=4096)
def _experts(key: ModelKey, ep: int, etp: int, edp: int) -> WeightUnit:
    model = key.model
    local_experts, hidden, dim = model.num_experts // ep, model.expert_hidden // etp, model.dim
    shapes: list[Shape] = [(local_experts, hidden, dim), (local_experts, hidden, dim), (local_experts, dim, hidden)]
    dims = [2, 2, 1]
    if model.expert_biases:
        shapes += [(local_experts, hidden), (local_experts, hidden), (local_experts, dim // etp)]
        dims += [1, 1, 1]
    # Whole experts to each data rank if they divide evenly, else slices of a width: titanmoe.parallel.sharded.
    return WeightUnit(tuple(shapes), tuple(dims) if local_experts % edp else (0,) * len(shapes))


class Sizes:
    """The units of a model under a mapping."""

    def __init__(self, model: Model, tp: int, ep: int, etp: int, edp: int):
        self.model = model
        self._key = ModelKey.of(model)
        self.experts = _experts(self._key, ep, etp, edp)
        self._tp, self._mixers = tp, self._key.mixers
        dim, split = model.dim, model.vocab_size // tp
        self.embedding = WeightUnit(((split, dim),), (0,))
        self.head = WeightUnit(((dim,), (split, dim)), (0, 0))

    def block(self, layer: int) -> WeightUnit:
        return _block(self._key, self._tp, self._mixers[layer], has_experts(self.model, layer))

    @property
    def multi_token(self) -> WeightUnit:
        dim = self.model.dim
        return _unit(1, [((dim,), None)] * 3 + [((dim, 2 * dim), None)])


def units_of_stage(
    config: Config, sizes: Sizes, layers: range, first: bool, last: bool
) -> tuple[list[WeightUnit], int]:
    """The units sharded over attention's data ranks, and how many blocks have experts."""
    model = config.model
    numbers = [*layers, *range(model.num_layers, model.num_layers + model.mtp_depth * last)]
    units = [sizes.block(layer) for layer in numbers]
    if last and model.mtp_depth:
        units += [sizes.multi_token] + [sizes.embedding] * (not first)
    if first:
        units.append(sizes.embedding)
    if last:
        tied = model.tie_embeddings and first
        units.append(WeightUnit(((model.dim,),), (0,)) if tied else sizes.head)
    return units, sum(has_experts(model, layer) for layer in numbers)


def fsdp(fold: Fold) -> int:
    """Ranks among which a block's weights are sharded."""
    return fold.dp_shard * fold.cp
