"""Work that Muon's update adds to a step on each rank: Newton-Schulz FLOPs, and bytes of the messages of matrices.

The planner prices it (`titanmoe.plan.price`); what runs is `titanmoe.parallel.full_matrices`.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod
from typing import NamedTuple

from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.models import tensors
from titanmoe.models.matrices import ROUND, matrices_of, matrix_parameters
from titanmoe.models.mixers.mixer_spec import Shape
from titanmoe.models.tensors import Tuning
from titanmoe.plan.sizes import ModelKey


class MuonWork(NamedTuple):
    """Work of Muon's update of one step, the mean of all ranks."""

    flops: float = 0.0
    attention_bytes: float = 0.0
    """Bytes sent over dp_shard, cp and tp."""
    expert_bytes: float = 0.0
    """Bytes sent over edp and etp."""


class Alike(NamedTuple):
    """Weights of several layers that have one name and one shape, and so the same matrices."""

    name: str
    """Last part of their names."""
    shape: Shape
    """Shape of one weight, unsharded."""
    num_weights: int
    flops: int
    """FLOPs of one Newton-Schulz step of all matrices in the last two dims of one weight."""
    copied: bool
    """Whether every rank of tp has the full weight."""


@lru_cache(maxsize=64)
def _weights(key: ModelKey, tp: int, by_head: bool, router: bool, tuning: Tuning) -> list[Alike]:
    """Return the trained weights that Muon treats as matrices, grouped by name and full shape.

    Args:
        tp: ranks of tensor parallel, which decide what is copied rather than divided.
        by_head: optimizer.by_head.
        router: optimizer.router_matrix.
    """
    replicated = {
        name
        for mixer in key.mixers
        for name, (_, dim) in tensors.block_splits(key.model, mixer, True, tp).items()
        if dim is None
    }
    counts = Counter(
        (".".join(name.split(".")[-3:]), shape, rows)
        for name, (shape, rows) in matrix_parameters(key.model, router).items()
        if not tuning.freezes(name)
    )
    out = []
    for (name, shape, rows), count in counts.items():
        flops = sum(matrix.flops_per_step for matrix in matrices_of(shape[-2:], rows, by_head))
        out.append(Alike(name, shape, count, flops, name in replicated))
    return out


def muon_work(config: Config, fold: Fold) -> MuonWork:
    """Return the FLOPs and sent bytes of one step's Newton-Schulz per rank, the mean of all ranks.

    Replicas repeat the work, and every rank that of the routers. The optimizer is taken to be Muon, whatever the recipe
    has.
    """
    model, options = config.model, config.optimizer
    width = _element_bytes(config)
    dense, experts = fold.dp_shard * fold.cp * fold.tp, fold.edp * fold.etp
    sliced = model.num_experts // fold.ep % fold.edp != 0
    flops, dense_bytes, expert_bytes = 0.0, 0.0, 0.0
    for alike in _weights(ModelKey.of(model), fold.tp, options.by_head, options.router_matrix, Tuning.of(config)):
        work, count = options.ns_steps * alike.flops * alike.num_weights, alike.num_weights
        if ".experts." in alike.name:
            local = alike.shape[0] // fold.ep
            flops += work * local / experts
            each = _expert_matrix_bytes(alike.name, alike.shape[-2:], fold, sliced, width)
            expert_bytes += count * local * each / experts
        elif alike.name.endswith("router.weight"):
            flops += work
        else:
            flops += work / dense
            copies = fold.tp if alike.copied else 1
            dense_bytes += count * (1 + copies) * prod(alike.shape) * (dense - 1) / dense * width / dense
    return MuonWork(flops / fold.pp, dense_bytes / fold.pp, expert_bytes / fold.pp)


def matrix_buffer_bytes(config: Config, fold: Fold) -> int:
    """Return the most bytes of the send and receive buffers of a rank, in which Muon's update exchanges matrices."""
    work, options = muon_work(config, fold), config.optimizer
    width = _element_bytes(config)
    dense, experts = fold.dp_shard * fold.cp * fold.tp, fold.edp * fold.etp
    weights = _weights(ModelKey.of(config.model), fold.tp, options.by_head, options.router_matrix, Tuning.of(config))
    # A round has at most ROUND elements of a rank, or a single larger weight.
    shards = (prod(weight.shape) // (fold.ep * experts if ".experts." in weight.name else dense) for weight in weights)
    # A rank sends the others' shards, and gets its own updated; the messages have its own shards too.
    directions = (work.attention_bytes, dense), (work.expert_bytes, experts)
    both = max(sent * ranks / max(1, ranks - 1) for sent, ranks in directions)
    return min(2 * max(ROUND, *shards) * width, round(both))


def _element_bytes(config: Config) -> int:
    """Return the bytes of a number in Newton-Schulz and its messages."""
    return 8 if config.training.dtype == "float64" else WIDTHS[config.optimizer.ns_dtype]


def _expert_matrix_bytes(name: str, shape: Shape, fold: Fold, sliced: bool, width: int) -> float:
    """Return the bytes that the ranks sharding one expert matrix send together in an update.

    They send shards to the matrix's owner and back, or, where that is less, sum Gram matrices over the shards.

    Args:
        shape: the matrix, unsharded.
        fold: degrees of the mapping; edp x etp ranks may share a matrix.
        sliced: whether data ranks shard matrices rather than take full ones.
        width: bytes of a number in Newton-Schulz.
    """
    ranks = fold.edp * fold.etp
    if fold.etp == 1 and not sliced:
        return 0.0
    hidden = tensors.EXPERT_SPLITS[name.rpartition(".")[2]] - 1
    sharded_dims = ([hidden] if fold.etp > 1 else []) + ([1 - hidden] if sliced else [])
    small, large = sorted(shape)
    owner = 2 * prod(shape) * (ranks - 1) / ranks * width
    gram = 2 * (ranks - 1) * small**2 * max(width, 4)
    return min(owner, gram) if small < large and sharded_dims == [shape.index(large)] else owner
