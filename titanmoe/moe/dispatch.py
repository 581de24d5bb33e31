"""Rows to the ranks of their experts, and back. A dispatcher knows tokens and ranks, not what experts do.

    rows, weights, counts, route = dispatcher.dispatch(x, weights, chosen, bin_rows)
    y = dispatcher.combine(experts(rows, weights, counts), route)

or in pieces, so that other work can be done while rows are on their way:

    sent = dispatcher.start(x, weights, chosen, bin_rows)
    ...                                                 for example here
    parts, route = dispatcher.parts(sent)
    for part in parts:                                  while the next parts are on their way
        rows, weights, counts, splits = dispatcher.arrive(part)
        back.append(dispatcher.leave(experts(rows, weights, counts), splits))
    y = dispatcher.land(back, route)

Shapes: T tokens this rank owns, D model, K top-k, E experts, e local experts, G ranks of the dispatch group (ep x etp,
etp innermost), R rows this rank's experts work on, C chunks. Expert number E stands for "no expert".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm import collectives
from titanmoe.comm.collectives import NO_GROUP, Group, InFlight, all_gather, all_to_all, gather, scatter_sum
from titanmoe.comm.host import ToHost
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.moe.assign import (
    Route,
    assign_all_rows,
    assign_rows,
    by_expert,
    copy_rows,
    sort_by_expert,
    split_into_chunks,
)
from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.moe.permute import reorder, reorder_weighted, to_rows, to_tokens
from titanmoe.observe import named


class Splits(NamedTuple):
    """Where the rows of one part came from."""

    regroup: tuple[Tensor, Tensor] | None  # order (and inverse) from by-sender to by-expert
    send: list[int] | None
    receive: list[int] | None
    lent: Any = None  # for rows that did not come by an all-to-all


class Part(NamedTuple):
    """Rows and their routing weights on their way to this rank's experts."""

    x_RD: InFlight
    weights_R1: InFlight
    count_e: Tensor
    splits: Splits


class SharedBuffers:
    """What the dispatchers of a rank share, attached to them while a step runs."""

    def __init__(self, device: torch.device):
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the step is void on this rank and must be repeated without these buffers."""

    def were_too_small(self, flags: float) -> bool:
        """Whether the step is void on any rank. flags: `overflowed`, summed over the ranks."""
        return bool(flags)

    @contextmanager
    def attach(self, dispatchers: Collection[Dispatcher]) -> Iterator[None]:
        self.overflowed.zero_()
        try:
            for dispatcher in dispatchers:
                dispatcher.memory = self
            yield
        finally:
            for dispatcher in dispatchers:
                dispatcher.memory = None


class Dispatcher:
    """The pieces, for a dispatcher that has nothing in flight between them and only defines dispatch and combine."""

    def __init__(self, num_experts: int, chunks: int = 1, kernels: str = "auto"):
        self.num_experts, self.chunks, self.kernels = num_experts, chunks, kernels
        self.set_groups(NO_GROUP, 1, 1)

    def set_groups(self, group: Group, ep: int, etp: int) -> None:
        """The ranks that have the experts; called when the model is placed on the meshes."""
        self.group, self.ep, self.etp = group, ep, etp
        self.local_experts = self.num_experts // ep

    def set_nodes(self, within: Group, across: Group) -> None:
        """within: this group's ranks on this node. across: the ranks at this rank's position on each of its nodes."""

    @staticmethod
    def missing(device: str) -> str:
        """Why this machine cannot run it; "" if it can. device: as in training.device."""
        return ""

    @staticmethod
    def reserve(config: Config, fold: Fold, group: Group, device: torch.device) -> SharedBuffers | None:
        """What all layers of a rank share, made by all ranks of the world together; None if it needs nothing."""
        return None

    @named("dispatch")
    def start(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int) -> Any:
        return self.dispatch(x_TD, weights_TK, chosen_TK, bin_rows)

    def parts(self, sent: Any) -> tuple[list, Any]:
        return [sent], None

    def arrive(self, part: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        return part

    @named("combine")
    def leave(self, y_RD: Tensor, route: Any) -> Any:
        return self.combine(y_RD, route)

    def land(self, back: list, route: Any) -> Tensor:
        (y_TD,) = back
        return y_TD


class _InPieces(Dispatcher):
    """A dispatcher that defines the pieces. Its dispatch and combine, in one call each, are for a single chunk."""

    def dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Route]:
        """bin_rows: rows per expert and sender if bins are padded to a static size, else 0."""
        (part,), route = self.parts(self.start(x_TD, weights_TK, chosen_TK, bin_rows))
        x_RD, weights_R1, count_e, splits = self.arrive(part)
        return x_RD, weights_R1, count_e, route._replace(back=(route.back, splits))

    def combine(self, y_RD: Tensor, route: Route) -> Tensor:
        outer, splits = route.back
        return self.land([self.leave(y_RD, splits)], route._replace(back=outer))


class AllToAll(_InPieces):
    """Each token travels only to the ranks of its experts: one all-to-all there, one back.

    A row goes to all etp ranks of its expert in the same all-to-all. Each returns its summand of the down projection,
    and the sum over top-k on the token's own rank adds these too: expert tensor parallelism costs no extra collective.
    Per rank and direction: T*K*etp rows of D elements, less the rows that stay.

    With chunks, the rows of every expert are split into that many pieces, and piece c of all experts travels in
    all-to-all c. So the work of chunks is even under any routing, and their sizes are static if bins are padded.
    """

    @named("dispatch")
    def start(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int) -> tuple[list[Part], Route]:
        C, G, e = self.chunks, self.group.size, self.local_experts
        if C == 1 and not bin_rows:
            return self.start_whole(x_TD, weights_TK, chosen_TK)
        bin_rows = -(-bin_rows // C)
        chosen_TK, order, count_CE = split_into_chunks(chosen_TK, self.num_experts, C, bin_rows)
        if bin_rows:
            send = receive = [None] * C
            sizes = [self.num_experts * self.etp * bin_rows] * C
            count_GCe = count_CE.new_full((G, C, e), bin_rows)
        else:
            send_CGe = count_CE.view(C, self.ep, 1, e).expand(-1, -1, self.etp, -1).reshape(C, G, e)
            send_GCe = send_CGe.transpose(0, 1).contiguous()
            count_GCe = all_to_all(send_GCe, self.group)
            # The layer's only host sync: how many rows go where.
            send, receive = torch.stack((send_GCe.sum(2).t(), count_GCe.sum(2).t())).tolist()
            sizes = [sum(to) for to in send]
        entry_R, slot = assign_rows(chosen_TK, order, count_CE, C * self.ep, self.etp, bin_rows, sum(sizes))
        x_RD, weights_R1, route = copy_rows(x_TD, weights_TK, entry_R, slot, self.kernels)
        in_flight = [
            (collectives.start(x, self.group, *split), collectives.start(weights, self.group, *split))
            for x, weights, split in zip(
                x_RD.split(sizes), weights_R1.split(sizes), zip(send, receive, strict=True), strict=True
            )
        ]
        parts = []
        for c, (x, weights) in enumerate(in_flight):
            count_Ge, regroup = count_GCe[:, c], None
            if G > 1 and e > 1:
                regroup = by_expert(count_Ge, G * e * bin_rows if bin_rows else sum(receive[c]), self.kernels)
            parts.append(Part(x, weights, count_Ge.sum(0), Splits(regroup, send[c], receive[c])))
        return parts, route

    def start_whole(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> tuple[list[Part], Route]:
        """In one chunk without padded bins. Before the host knows how many rows there are, a buffer with room for all
        that there can be is filled; later its end is dropped. So the device has work while the host waits.
        """
        G, e = self.group.size, self.local_experts
        entry_H, slot, count_E = assign_all_rows(chosen_TK, self.num_experts, self.ep, self.etp, self.kernels)
        send_Ge = count_E.view(self.ep, 1, e).expand(-1, self.etp, -1).reshape(G, e)
        count_Ge = all_to_all(send_Ge, self.group)
        sizes = ToHost(torch.stack((send_Ge, count_Ge)).sum(2) if G > 1 else send_Ge.sum(1).expand(2, 1))
        x_RD, weights_R1, route = copy_rows(x_TD, weights_TK, entry_H, slot, self.kernels)
        send, receive = sizes.read()  # the layer's only host sync
        if (rows := sum(send)) < len(x_RD):  # choices of no expert came last
            x_RD, weights_R1 = x_RD[:rows], weights_R1[:rows]
            route = route._replace(source_R=route.source_R[:rows], slot_TJ=route.slot_TJ.clamp(max=rows))
        x, weights = (collectives.start(sent, self.group, send, receive) for sent in (x_RD, weights_R1))
        regroup = by_expert(count_Ge, sum(receive), self.kernels) if G > 1 and e > 1 else None
        count_e = count_Ge.sum(0) if G > 1 else count_E
        return [Part(x, weights, count_e, Splits(regroup, send, receive))], route

    def parts(self, sent: tuple[list[Part], Route]) -> tuple[list[Part], Route]:
        return sent

    @named("dispatch")
    def arrive(self, part: Part) -> tuple[Tensor, Tensor, Tensor, Splits]:
        x_RD, weights_R1 = collectives.arrive(part.x_RD), collectives.arrive(part.weights_R1)
        if part.splits.regroup is not None:
            x_RD, weights_R1 = reorder_weighted(x_RD, weights_R1, *part.splits.regroup, self.kernels)
        return x_RD, weights_R1, part.count_e, part.splits

    @named("combine")
    def leave(self, y_RD: Tensor, splits: Splits) -> InFlight:
        if splits.regroup is not None:
            y_RD = reorder(y_RD, *reversed(splits.regroup), self.kernels)
        return collectives.start(y_RD, self.group, splits.receive, splits.send)

    @named("combine")
    def land(self, back: list[InFlight], route: Route) -> Tensor:
        pieces = [collectives.arrive(flight) for flight in back]
        y_RD = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return to_tokens(y_RD, route.source_R, route.slot_TJ, self.kernels)


class Relay(NamedTuple):
    """A hierarchical dispatch while its rows travel between nodes."""

    x_VD: InFlight
    weights_VK: InFlight
    chosen_VK: InFlight
    bin_rows: int
    route: Route


class Hierarchical(_InPieces):
    """Each token crosses once to every node that has experts of it, and goes to all of them inside the node.

    First to the rank at this rank's position on that node, then by an all-to-all inside the node, which makes the
    copies for several experts and for etp. On the way back the node sums what its experts return, and one row crosses.
    Per rank and direction: one row for each token and other node it visits, V rows in all arriving here, and inside the
    node what those V tokens need there. With a group inside one node nothing crosses, and this is AllToAll.
    """

    def set_groups(self, group: Group, ep: int, etp: int) -> None:
        super().set_groups(group, ep, etp)
        self.set_nodes(group, NO_GROUP)

    def set_nodes(self, within: Group, across: Group) -> None:
        self.across = across
        self.node_experts = self.num_experts // across.size
        self.inner = AllToAll(self.node_experts, self.chunks, self.kernels)
        self.inner.set_groups(within, self.ep // across.size, self.etp)

    @named("dispatch")
    def start(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int) -> Any:
        T, N, across = x_TD.shape[0], self.across.size, self.across
        if N == 1:
            return self.inner.start(x_TD, weights_TK, chosen_TK, bin_rows)
        # Each node of a token once; "no expert" is on node N, which does not exist.
        visits_TN = torch.zeros(T, N + 1, dtype=torch.bool, device=x_TD.device)
        visits_TN = visits_TN.scatter_(1, chosen_TK // self.node_experts, True)[:, :N]
        node_TN = torch.arange(N, device=x_TD.device).where(visits_TN, N)
        order, count_N = sort_by_expert(node_TN, N)
        if bin_rows:  # a static size: a token may visit every node
            send = receive = [T] * N
        else:
            send, receive = torch.stack((count_N, all_to_all(count_N, across))).tolist()  # the first of two host syncs
        entry_R, slot = assign_rows(node_TN, order, count_N, N, 1, T if bin_rows else 0, sum(send))
        route = Route(entry_R // N, slot.view(T, N), (send, receive))
        choices_RK = F.pad(chosen_TK, (0, 0, 0, 1), value=self.num_experts).index_select(0, route.source_R)
        rows = (
            to_rows(x_TD, route.source_R, route.slot_TJ, self.kernels),
            to_rows(weights_TK, route.source_R, route.slot_TJ, self.kernels),
            choices_RK.to(torch.int32),
        )
        return Relay(*(collectives.start(row, across, send, receive) for row in rows), bin_rows * N, route)

    @named("dispatch")
    def parts(self, sent: Any) -> tuple[list[Part], Route]:
        if self.across.size == 1:
            return self.inner.parts(sent)
        x_VD, weights_VK = collectives.arrive(sent.x_VD), collectives.arrive(sent.weights_VK)
        chosen_VK = collectives.arrive(sent.chosen_VK).long() - self.across.rank * self.node_experts
        here = (chosen_VK >= 0) & (chosen_VK < self.node_experts)
        chosen_VK = chosen_VK.where(here, self.node_experts)
        parts, inside = self.inner.parts(self.inner.start(x_VD, weights_VK, chosen_VK, sent.bin_rows))
        return parts, sent.route._replace(back=(*sent.route.back, inside))

    def arrive(self, part: Part) -> tuple[Tensor, Tensor, Tensor, Splits]:
        return self.inner.arrive(part)

    def leave(self, y_RD: Tensor, splits: Splits) -> InFlight:
        return self.inner.leave(y_RD, splits)

    @named("combine")
    def land(self, back: list[InFlight], route: Route) -> Tensor:
        if self.across.size == 1:
            return self.inner.land(back, route)
        send, receive, inside = route.back
        y_RD = collectives.arrive(collectives.start(self.inner.land(back, inside), self.across, receive, send))
        return to_tokens(y_RD, route.source_R, route.slot_TJ, self.kernels)


class AllGather(Dispatcher):
    """Every rank of ep x etp gets all tokens of the group and picks those of its experts; the sums are scattered back.

    Per rank and direction: T * (G - 1) rows of D elements for any top_k, in even pieces. Useful for a group of about
    two, or if top_k is near ep.
    """

    def dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Route]:
        x_ND, weights_NK = gather(x_TD, 0, self.group), gather(weights_TK, 0, self.group)
        # Numbered from this rank's first expert; all other experts become "no expert".
        chosen_NK = all_gather(chosen_TK, 0, self.group) - self.group.rank // self.etp * self.local_experts
        mine = (chosen_NK >= 0) & (chosen_NK < self.local_experts)
        chosen_NK = chosen_NK.where(mine, self.local_experts)
        order, count_e = sort_by_expert(chosen_NK, self.local_experts)
        bin_rows *= self.group.size
        rows = self.local_experts * bin_rows if bin_rows else int(count_e.sum())  # the layer's only host sync
        entry_R, slot = assign_rows(chosen_NK, order, count_e, 1, 1, bin_rows, rows)
        x, weights, route = copy_rows(x_ND, weights_NK, entry_R, slot, self.kernels)
        return x, weights, torch.full_like(count_e, bin_rows) if bin_rows else count_e, route

    def combine(self, y_RD: Tensor, route: Route) -> Tensor:
        return scatter_sum(to_tokens(y_RD, route.source_R, route.slot_TJ, self.kernels), 0, self.group)


def dispatcher_class(name: str) -> type[Dispatcher]:
    """The class for a value of `[moe] dispatcher`."""
    return DISPATCHERS.implementation(name)
