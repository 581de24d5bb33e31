"""Each token travels only to the ranks of its experts: one all-to-all there, one back.

Shapes as in titanmoe.moe.dispatchers.protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanmoe.comm import turns
from titanmoe.comm.collectives import InFlight, arrive, send_back, start
from titanmoe.comm.counts import Counts
from titanmoe.comm.recomputation import again, keep, keep_tensor
from titanmoe.moe.assign import (
    Route,
    assign_all_rows,
    assign_rows,
    by_expert,
    copy_rows,
    cut,
    pieces,
    split_into_chunks,
)
from titanmoe.moe.dispatchers.protocol import Dispatcher
from titanmoe.moe.permute import can_pack, reorder, reorder_packed, reorder_weighted, to_tokens
from titanmoe.observe import named
from titanmoe.ops import device


class AllToAll(Dispatcher):
    """A row goes to all etp ranks of its expert in the same all-to-all. Each returns its summand of the down
    projection, and the sum over top-k on the token's own rank adds these too: expert tensor parallelism costs no extra
    collective. Per rank and direction: T*K*etp rows of D elements, less the rows that stay.

    With n chunks, the rows of every expert are divided into n shares, and share c of all experts travels in all-to-all
    c. So chunks are equally large under any routing, and their sizes are static if bins are padded.
    """

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int) -> AllToAllExchange:
        """If bins are not padded, rows fill a buffer of the largest possible size before their number is known; then
        the unused end is cut off.
        """
        C, G, e = self.chunks, self.group.size, self.local_experts
        host_waits = device.way(x_TD, True, cpu=False, compiled=True)
        if G == C == 1 and not bin_rows and self.allows_unused_rows and host_waits:
            return self.dispatch_to_itself(x_TD, weights_TK, chosen_TK)
        bin_rows = -(-bin_rows // C)
        entry_R, slot, count_CE, counts = keep("places", lambda: self.assign(chosen_TK, bin_rows))
        # Rows that are reordered when they arrive are packed with their weights, and unpacked, on the way.
        packed = G > 1 and e > 1 and can_pack(x_TD, self.kernels)
        x_RD, weights_R1, route = copy_rows(x_TD, weights_TK, entry_R, slot, self.kernels, packed)
        if counts is None:
            send = receive = [None] * C
            sizes = [self.num_experts * self.etp * bin_rows] * C
            count_GCe = count_CE.new_full((G, C, e), bin_rows)
        else:
            turns.give_up_in_backward(x_RD)
            count_GCe, send, receive = keep("counts", counts.read)  # the layer's only host sync
            sizes = [sum(to) for to in send]
            route = cut(route, sum(sizes))

        def start_weights(weights: Tensor, *split: Any) -> InFlight:
            return InFlight(weights, None) if again() else start(weights, self.group, *split)

        weights = [weights_TK.dtype] * C if weights_R1 is None else pieces(weights_R1, sizes)
        flights = [
            (start(x, self.group, *split), w if packed else start_weights(w, *split))
            for x, w, split in zip(pieces(x_RD, sizes), weights, zip(send, receive, strict=True), strict=True)
        ]
        chunks = []
        for c, flight in enumerate(flights):
            count_Ge, regroup = count_GCe[:, c], None
            if G > 1 and e > 1:
                rows = G * e * bin_rows if bin_rows else sum(receive[c])
                regroup = keep("order", partial(by_expert, count_Ge, rows, self.kernels))
            count_e = count_Ge.sum(0) if G > 1 else count_Ge[0]
            chunks.append(AllToAllChunk(*flight, count_e, regroup, self.kernels))
        return AllToAllExchange(chunks, route, self.kernels)

    def dispatch_to_itself(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> AllToAllExchange:
        """Lay out the routed tokens of a rank that has all experts, without a host sync: nothing is sent, so the host
        need not know their number. What experts make of unused rows, which come last, is undefined and reaches no
        token.
        """
        entry_R, slot, count_e = keep(
            "places", lambda: assign_all_rows(chosen_TK, self.num_experts, 1, 1, self.kernels)
        )
        x_RD, weights_R1, route = copy_rows(x_TD, weights_TK, entry_R, slot, self.kernels)
        chunk = AllToAllChunk(InFlight(x_RD, None), InFlight(weights_R1, None), count_e, None, self.kernels)
        return AllToAllExchange([chunk], route, self.kernels)

    def assign(self, chosen_TK: Tensor, bin_rows: int) -> tuple[Tensor, Tensor, Tensor, Counts | None]:
        """The choice of each row and the rows of each choice; each expert's count, by chunk; and the counts on their
        way, unless bins are padded."""
        C = self.chunks
        if C == 1 and not bin_rows:
            entry_R, slot, count_CE = assign_all_rows(chosen_TK, self.num_experts, self.ep, self.etp, self.kernels)
            return entry_R, slot, count_CE, self.send_counts(count_CE)
        chosen_TK, order, count_CE = split_into_chunks(chosen_TK, self.num_experts, C, bin_rows)
        counts = None if bin_rows else self.send_counts(count_CE)
        most = (C * self.num_experts * bin_rows or chosen_TK.numel()) * self.etp
        return *assign_rows(chosen_TK, order, count_CE, C * self.ep, self.etp, bin_rows, most), count_CE, counts

    def send_counts(self, count_CE: Tensor) -> Counts:
        C, e = self.chunks, self.local_experts
        send_CGe = count_CE.view(C, self.ep, 1, e).expand(-1, -1, self.etp, -1).reshape(C, self.group.size, e)
        return Counts(send_CGe.transpose(0, 1).contiguous(), self.group, device.kind(count_CE) == "cuda")


class AllToAllChunk(NamedTuple):
    """Rows and their routing weights on their way to this rank's experts. FSDP's hooks look at every field, and at
    every item of its lists: how many rows go to each rank is in the flights' wires.
    """

    x_RD: InFlight
    weights_R1: InFlight | torch.dtype
    """Their dtype, if the rows are packed with them."""
    count_e: Tensor
    regroup: tuple[Tensor, Tensor] | None
    """The order (and its inverse) from by-sender to by-expert."""
    kernels: str

    @named("dispatch")
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        x_RD = arrive(self.x_RD)
        if isinstance(self.weights_R1, torch.dtype):
            return *reorder_packed(x_RD, *self.regroup, self.weights_R1), self.count_e
        weights_R1 = keep_tensor("weights", lambda: arrive(self.weights_R1))
        if self.regroup is not None:
            x_RD, weights_R1 = reorder_weighted(x_RD, weights_R1, *self.regroup, self.kernels)
        return x_RD, weights_R1, self.count_e

    @named("combine")
    def send_back(self, y_RD: Tensor) -> InFlight:
        if self.regroup is not None:
            y_RD = reorder(y_RD, *reversed(self.regroup), self.kernels)
        return send_back(y_RD, self.x_RD)


@dataclass
class AllToAllExchange:
    on_their_way: list[AllToAllChunk]
    route: Route
    kernels: str

    def chunks(self) -> list[AllToAllChunk]:
        return self.on_their_way

    @named("combine")
    def combine(self, back: list[InFlight]) -> Tensor:
        pieces = [arrive(flight) for flight in back]
        y_RD = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return to_tokens(y_RD, self.route.source_R, self.route.slot_TJ, self.kernels)
