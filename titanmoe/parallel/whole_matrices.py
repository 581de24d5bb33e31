"""Work on whole matrices of weights that are cut over ranks: who brings which together.

Replicas are teams of their own (titanmoe.parallel.matrix_pieces) and do the same work, so nothing travels between
them. Within a team, a weight's matrices are worked on in one of three ways, which its members work out alike from
shapes alone:

    local   each is whole wherever a rank has any of it, as experts usually are: no message
    owner   each is sent to one rank, worked on there, and sent back; owners have equal work
    gram    cut along their larger dim alone: X X' is the sum of the pieces' own, and the rest is local. Chosen where it
            takes fewer bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group, all_reduce, send_rows, wait
from titanmoe.models.matrices import ROUND, Matrix
from titanmoe.parallel.matrix_pieces import Piecewise, Team


def owners(costs: list[int], loads: list[int]) -> list[int]:
    """Who works on which: the most expensive first, each to whoever has least to do. Adds the work to loads."""
    out = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):  # stable, so all ranks agree
        out[i] = loads.index(min(loads))
        loads[out[i]] += costs[i]
    return out


@dataclass
class OwnerExchange:
    """Sends matrices of a team to their owners, and what these make of them back."""

    team: Team
    parts: list[tuple[Piecewise, int]]
    """Weights, and which of their matrices."""
    owner: list[int]

    def __post_init__(self) -> None:
        rank, ranks = self.team.group.rank, range(len(self.team.places))
        # By owner, as messages are.
        order = sorted(range(len(self.parts)), key=lambda i: self.owner[i])
        self.by_owner = [self.parts[i] for i in order]
        self.mine = [self.parts[i] for i in order if self.owner[i] == rank]
        numbers = self._numbers
        self.there = [0] * len(ranks), [sum(numbers(part, r, sent=True) for part in self.mine) for r in ranks]
        self.back = [sum(numbers(part, r) for part in self.mine) for r in ranks], [0] * len(ranks)
        for i, part in enumerate(self.parts):
            self.there[0][self.owner[i]] += numbers(part, rank, sent=True)
            self.back[1][self.owner[i]] += numbers(part, rank)

    @property
    def numbers(self) -> int:
        """How many this rank sends, there and back."""
        rank = self.team.group.rank
        return sum(n for to in (self.there[0], self.back[0]) for r, n in enumerate(to) if r != rank)

    @staticmethod
    def _numbers(part: tuple[Piecewise, int], rank: int, sent: bool = False) -> int:
        weight, index = part
        return prod(weight.cut.overlaps[index][rank].shape) * (weight.cut.senders[rank] or not sent)

    def run(
        self,
        pieces: Mapping[str, Tensor],
        work: Callable[[Tensor], Tensor],
        scale: Callable[[Matrix], float],
        dtype: torch.dtype,
    ) -> None:
        """pieces: this rank's, by name, which are overwritten. scale: of what comes out, once it has their dtype.
        dtype: in which matrices travel."""
        group, rank = self.team.group, self.team.group.rank
        own = [(weight, weight.cut.matrices[i], weight.cut.overlaps[i][rank]) for weight, i in self.by_owner]
        like, ranks = next(iter(pieces.values())), range(len(self.team.places))

        def joined(parts: Iterable[Tensor], numbers: int) -> Tensor:
            out, begin = like.new_empty(numbers, dtype=dtype), 0
            for part in parts:
                out[begin : begin + part.numel()].view(part.shape).copy_(part)
                begin += part.numel()
            return out

        mine = (lap.take(pieces[w.name]) for w, _, lap in own if w.cut.senders[rank] and lap.rows)
        arrived, begin = wait(send_rows(joined(mine, sum(self.there[0])), *self.there, group), group), 0
        wholes = [arrived.new_empty(weight.cut.matrices[i].shape) for weight, i in self.mine]
        for r in ranks:
            for (weight, i), whole in zip(self.mine, wholes, strict=True):
                lap = weight.cut.overlaps[i][r]
                if lap.rows and weight.cut.senders[r]:
                    end = begin + prod(lap.shape)
                    lap.into_whole(whole, arrived[begin:end].view(lap.shape))
                    begin = end
        del arrived  # so that matrices are here twice at most, at any time
        for i, whole in enumerate(wholes):
            wholes[i] = work(whole)
        answers = (
            weight.cut.overlaps[i][r].of_whole(whole)
            for r in ranks
            for (weight, i), whole in zip(self.mine, wholes, strict=True)
            if weight.cut.overlaps[i][r].rows
        )
        message = joined(answers, sum(self.back[0]))
        wholes.clear()
        arrived, begin = wait(send_rows(message, *self.back, group), group), 0
        for weight, matrix, lap in own:
            if lap.rows:
                end, to = begin + prod(lap.shape), pieces[weight.name]
                lap.put(to, arrived[begin:end].view(lap.shape).to(to.dtype) * scale(matrix))
                begin = end


@dataclass
class Round:
    """Weights that are worked on at the same time, so that memory is limited."""

    weights: list[Piecewise] = field(default_factory=list)
    grams: dict[Group, list[Piecewise]] = field(default_factory=dict)
    """Those whose gram matrices are summed, by the group to sum over."""
    exchanges: list[OwnerExchange] = field(default_factory=list)

    @property
    def local(self) -> list[Piecewise]:
        return [weight for weight in self.weights if weight.cut.local]


def rounds_of(weights: list[Piecewise], width: int) -> list[Round]:
    """width: bytes of a number that travels. Every rank of a team makes the same rounds."""
    out, size, loads = [Round()], 0, {}
    for weight in weights:
        more = max(prod(box.shape) for box in weight.cut.boxes)
        if size and size + more > ROUND:
            out.append(Round())
            size = 0
        out[-1].weights.append(weight)
        size += more
        if weight.cut.local:
            load = loads.setdefault(weight.cut.team.group, [0] * len(weight.cut.boxes))
            cost = weight.cut.matrices[0].flops_per_step if weight.cut.matrices else 0
            for rank, box in enumerate(weight.cut.boxes):
                load[rank] += cost * (box.shape[0] if weight.cut.whole_experts else 1)
    for turn in out:
        cut: dict[Group, list[tuple[Piecewise, int]]] = {}
        for weight in turn.weights:
            if weight.cut.local:
                continue
            sent, gram = weight.cut.sent_numbers
            if weight.cut.sums_gram and gram * max(width, 4) < sent * width:
                turn.grams.setdefault(weight.cut.team.group, []).append(weight)
            else:
                cut.setdefault(weight.cut.team.group, []).extend((weight, i) for i in range(len(weight.cut.matrices)))
        for group, parts in cut.items():
            team = parts[0][0].cut.team
            costs = [weight.cut.matrices[i].flops_per_step for weight, i in parts]
            load = loads.setdefault(group, [0] * len(team.places))
            turn.exchanges.append(OwnerExchange(team, parts, owners(costs, load)))
    return out


def sum_grams(weights: list[Piecewise], pieces: Mapping[str, Tensor], group: Group) -> list[Tensor]:
    """X X' of each matrix of the weights, with X wide: in float32 at least, summed over the group."""
    own = []
    for weight in weights:
        rank = weight.cut.team.group.rank
        for i, matrix in enumerate(weight.cut.matrices):
            lap, small = weight.cut.overlaps[i][rank], min(matrix.shape)
            piece = pieces[weight.name]
            dtype = torch.promote_types(piece.dtype, torch.float32)
            if weight.cut.senders[rank] and lap.rows:
                x = lap.take(piece).to(dtype)
                x = x if matrix.shape[0] == small else x.mT
                own.append(x @ x.mT)
            else:
                own.append(piece.new_zeros(small, small, dtype=dtype))
    total = all_reduce(torch.cat([gram.flatten() for gram in own]), group)
    return [g.view_as(gram) for gram, g in zip(own, total.split([gram.numel() for gram in own]), strict=True)]
