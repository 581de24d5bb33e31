"""Work on full matrices of weights that are sharded over ranks: decide which rank gathers which, and exchange them.

Called by Muon, which orthogonalizes full matrices. Replicas are shard groups of their own
(titanmoe.parallel.matrix_shards) and do the same work, so nothing is sent between them. Within a shard group a weight's
matrices are worked on in one of three ways, which its members choose equally from shapes alone:

    local   each matrix is full wherever a rank has any of it, as experts usually are: no message
    owner   each matrix is sent to one rank, worked on there, and sent back; owners have equal work
    gram    sharded along their larger dim alone: X X' is the sum of the shards' own, and the rest is local. Chosen
            where it takes fewer bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group, all_reduce, launch_all_to_all, wait
from titanmoe.models.matrices import ROUND, Matrix
from titanmoe.parallel.matrix_shards import ShardedWeight, ShardGroup


def assign_owners(costs: list[int], loads: list[int]) -> list[int]:
    """Return the rank that owns each matrix: the most expensive matrix first, each goes to the rank with least work.

    Ranks are those of the shard group, in the order of `costs`.

    Args:
        costs: work of each matrix, in FLOPs.
        loads: work that each rank of the shard group has already; the work of its new matrices is added in place.
    """
    out = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):  # stable, so all ranks agree
        out[i] = loads.index(min(loads))
        loads[out[i]] += costs[i]
    return out


@dataclass
class OwnerExchange:
    """The exchange of matrices whose full form one rank works on: shards to the owners, shards of results back."""

    shard_group: ShardGroup
    matrices: list[tuple[ShardedWeight, int]]
    """Weights, each with the index of one of their matrices."""
    owner: list[int]
    """The rank within the shard group that owns each of the matrices."""

    def __post_init__(self) -> None:
        rank, ranks = self.shard_group.group.rank, range(len(self.shard_group.coordinates))
        # By owner, as messages are.
        order = sorted(range(len(self.matrices)), key=lambda i: self.owner[i])
        self.by_owner = [self.matrices[i] for i in order]
        self.owned = [self.matrices[i] for i in order if self.owner[i] == rank]
        count = self._shard_elements
        self.to_owners = [0] * len(ranks), [sum(count(m, r, sent=True) for m in self.owned) for r in ranks]
        """Elements sent to each rank, and received from each, before the work."""
        self.from_owners = [sum(count(m, r) for m in self.owned) for r in ranks], [0] * len(ranks)
        """Elements sent to each rank, and received from each, after the work."""
        for i, matrix in enumerate(self.matrices):
            self.to_owners[0][self.owner[i]] += count(matrix, rank, sent=True)
            self.from_owners[1][self.owner[i]] += count(matrix, rank)

    @property
    def sent_elements(self) -> int:
        """Elements that this rank sends to other ranks: its shards to owners, and results as an owner."""
        rank = self.shard_group.group.rank
        return sum(n for to in (self.to_owners[0], self.from_owners[0]) for r, n in enumerate(to) if r != rank)

    @staticmethod
    def _shard_elements(matrix: tuple[ShardedWeight, int], rank: int, sent: bool = False) -> int:
        weight, index = matrix
        return prod(weight.sharding.shards[index][rank].shape) * (weight.sharding.is_sender[rank] or not sent)

    def run(
        self,
        weight_shards: Mapping[str, Tensor],
        work: Callable[[Tensor], Tensor],
        scale: Callable[[Matrix], float],
        dtype: torch.dtype,
    ) -> None:
        """Replace each matrix by what `work` returns for it, times its scale. Collective over the shard group; waits.

        Args:
            weight_shards: this rank's shards of the weights, by name, which are overwritten.
            work: gets a full matrix on its owner, returns one of the same shape, such as the orthogonalized matrix.
            scale: returns the factor of a matrix's result, applied in the dtype of the weight's shard.
            dtype: dtype of the matrices in messages and in `work`.
        """
        group, rank = self.shard_group.group, self.shard_group.group.rank
        local = [(weight, weight.sharding.matrices[i], weight.sharding.shards[i][rank]) for weight, i in self.by_owner]
        example, ranks = next(iter(weight_shards.values())), range(len(self.shard_group.coordinates))

        def joined(tensors: Iterable[Tensor], elements: int) -> Tensor:
            out, begin = example.new_empty(elements, dtype=dtype), 0
            for x in tensors:
                out[begin : begin + x.numel()].view(x.shape).copy_(x)
                begin += x.numel()
            return out

        sent = (s.read(weight_shards[w.name]) for w, _, s in local if w.sharding.is_sender[rank] and s.rows)
        received = wait(launch_all_to_all(joined(sent, sum(self.to_owners[0])), *self.to_owners, group), group)
        full, begin = [received.new_empty(weight.sharding.matrices[i].shape) for weight, i in self.owned], 0
        for r in ranks:
            for (weight, i), matrix in zip(self.owned, full, strict=True):
                shard = weight.sharding.shards[i][r]
                if shard.rows and weight.sharding.is_sender[r]:
                    end = begin + prod(shard.shape)
                    shard.write_to_full(matrix, received[begin:end].view(shard.shape))
                    begin = end
        del received  # so that at most two copies of the matrices exist at any time
        for i, matrix in enumerate(full):
            full[i] = work(matrix)
        results = (
            weight.sharding.shards[i][r].slice_of_full(matrix)
            for r in ranks
            for (weight, i), matrix in zip(self.owned, full, strict=True)
            if weight.sharding.shards[i][r].rows
        )
        message = joined(results, sum(self.from_owners[0]))
        full.clear()
        received, begin = wait(launch_all_to_all(message, *self.from_owners, group), group), 0
        for weight, matrix, shard in local:
            if shard.rows:
                end, out = begin + prod(shard.shape), weight_shards[weight.name]
                shard.write(out, received[begin:end].view(shard.shape).to(out.dtype) * scale(matrix))
                begin = end


@dataclass
class Round:
    """Weights whose full matrices are in memory at the same time. A step has one round after the other."""

    weights: list[ShardedWeight] = field(default_factory=list)
    grams: dict[Group, list[ShardedWeight]] = field(default_factory=dict)
    """Weights whose Gram matrices X X' are summed over ranks, by the group to sum over."""
    exchanges: list[OwnerExchange] = field(default_factory=list)
    """Exchanges with owners, one per shard group."""

    @property
    def local(self) -> list[ShardedWeight]:
        """The weights whose matrices are full on the ranks that have them, so that they need no message."""
        return [weight for weight in self.weights if weight.sharding.is_local]


def plan_rounds(weights: list[ShardedWeight], width: int) -> list[Round]:
    """Return the rounds in which an optimizer works on the full matrices of the weights, to limit memory.

    A round has weights, in their order, of whose shards a rank has at most ROUND elements together, or a single larger
    one. Each weight is local, has its Gram matrices summed, or has owners, whose work is balanced over all rounds.
    Every rank of a shard group plans the same, without communication. Without weights there is one round, empty.

    Args:
        weights: this rank's weights that consist of matrices.
        width: bytes of an element in messages.
    """
    out, size, loads = [Round()], 0, {}
    for weight in weights:
        more = max(prod(region.shape) for region in weight.sharding.regions)
        if size and size + more > ROUND:
            out.append(Round())
            size = 0
        out[-1].weights.append(weight)
        size += more
        if weight.sharding.is_local:
            load = loads.setdefault(weight.sharding.shard_group.group, [0] * len(weight.sharding.regions))
            cost = weight.sharding.matrices[0].flops_per_step if weight.sharding.matrices else 0
            for rank, region in enumerate(weight.sharding.regions):
                load[rank] += cost * (region.shape[0] if weight.sharding.has_full_experts else 1)
    for one in out:
        exchanged: dict[Group, list[tuple[ShardedWeight, int]]] = {}
        for weight in one.weights:
            sharding = weight.sharding
            if sharding.is_local:
                continue
            sent, gram = sharding.sent_elements
            if sharding.can_sum_grams and gram * max(width, 4) < sent * width:
                one.grams.setdefault(sharding.shard_group.group, []).append(weight)
            else:
                matrices = ((weight, i) for i in range(len(sharding.matrices)))
                exchanged.setdefault(sharding.shard_group.group, []).extend(matrices)
        for group, matrices in exchanged.items():
            shard_group = matrices[0][0].sharding.shard_group
            costs = [weight.sharding.matrices[i].flops_per_step for weight, i in matrices]
            load = loads.setdefault(group, [0] * len(shard_group.coordinates))
            one.exchanges.append(OwnerExchange(shard_group, matrices, assign_owners(costs, load)))
    return out


def sum_grams(weights: list[ShardedWeight], weight_shards: Mapping[str, Tensor], group: Group) -> list[Tensor]:
    """Return X X' of each matrix of the weights, summed over the group in float32 at least. Collective over the group.

    X is the matrix, or its transpose if it has more rows than columns. In the order of the weights, and of the matrices
    of each.

    Args:
        weights: weights of one shard group, whose matrices are sharded along their larger dim alone.
        weight_shards: this rank's shards of weights, by name.
        group: the ranks that have the shards.
    """
    grams = []
    for weight in weights:
        rank = weight.sharding.shard_group.group.rank
        for i, matrix in enumerate(weight.sharding.matrices):
            shard, small = weight.sharding.shards[i][rank], min(matrix.shape)
            weight_shard = weight_shards[weight.name]
            dtype = torch.promote_types(weight_shard.dtype, torch.float32)
            if weight.sharding.is_sender[rank] and shard.rows:
                x = shard.read(weight_shard).to(dtype)
                x = x if matrix.shape[0] == small else x.mT
                grams.append(x @ x.mT)
            else:
                grams.append(weight_shard.new_zeros(small, small, dtype=dtype))
    total = all_reduce(torch.cat([gram.flatten() for gram in grams]), group)
    return [g.view_as(gram) for gram, g in zip(grams, total.split([gram.numel() for gram in grams]), strict=True)]
