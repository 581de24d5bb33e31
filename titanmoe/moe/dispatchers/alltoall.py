"""Each token travels only to the ranks of its experts: one all-to-all there, one back.

Shapes as in titanmoe.moe.dispatchers.dispatcher.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.comm import turns
from titanmoe.comm.collectives import InFlight, arrive, send_back, start
from titanmoe.comm.counts import Counts
from titanmoe.moe.assign import (
    Route,
    assign_all_rows,
    assign_rows,
    by_expert,
    copy_rows,
    cut,
    first_rows,
    sort_by_expert,
)
from titanmoe.moe.dispatchers.dispatcher import Dispatcher
from titanmoe.moe.permute import can_pack, reorder, reorder_packed, reorder_weighted, to_tokens
from titanmoe.observe import named
from titanmoe.ops import device


class AllToAll(Dispatcher):
    """A row goes to all etp ranks of its expert in the same all-to-all. Each returns its summand of the down
    projection, and the sum over top-k on the token's own rank adds these too: expert tensor parallelism costs no extra
    collective. Per rank and direction: T*K*etp rows of D elements, less the rows that stay.
    """

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int) -> AllToAllExchange:
        """If bins are not padded, rows fill a buffer of the largest possible size before their number is known; then
        the unused end is cut off. A graph would copy the gradients once more for that, so it reads the number first.
        """
        G, e = self.group.size, self.local_experts
        host_waits = device.way(x_TD, True, cpu=False, compiled=True)
        if G == 1 and not bin_rows and self.allows_unused_rows and host_waits:
            return self.dispatch_to_itself(x_TD, weights_TK, chosen_TK)
        entry_R, slot, count_E, counts = self.assign(chosen_TK, bin_rows)
        in_graph = counts is not None and torch.compiler.is_compiling()
        if in_graph:
            count_Ge, send, receive = counts.read()
            entry_R, slot = entry_R.narrow(0, 0, sum(send)), slot.clamp(max=sum(send))
        # Rows that are reordered when they arrive are packed with their weights, and unpacked, on the way.
        packed = G > 1 and e > 1 and can_pack(x_TD, self.kernels)
        x_RD, weights_R1, route = copy_rows(x_TD, weights_TK, entry_R, slot, self.kernels, packed)
        if counts is None:
            send = receive = None  # the same size to and from every rank
            count_Ge = count_E.new_full((G, e), bin_rows)
        elif not in_graph:
            turns.give_up_in_backward(x_RD)
            count_Ge, send, receive = counts.read()  # the layer's only host sync
            x_RD, route = first_rows(x_RD, sum(send)), cut(route, sum(send))
            weights_R1 = None if packed else first_rows(weights_R1, sum(send))
        x_flight = start(x_RD, self.group, send, receive)
        weights = weights_TK.dtype if packed else start(weights_R1, self.group, send, receive, small=True)
        arriving = G * e * bin_rows if counts is None else sum(receive)
        regroup = by_expert(count_Ge, arriving, self.kernels) if G > 1 and e > 1 else None
        count_e = count_Ge.sum(0) if G > 1 else count_Ge[0]
        return AllToAllExchange(x_flight, weights, count_e, regroup, route, self.kernels)

    def dispatch_to_itself(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> AllToAllExchange:
        """Lay out the routed tokens of a rank that has all experts, without a host sync: nothing is sent, so the host
        need not know their number. What experts make of unused rows, which come last, is undefined and reaches no
        token.
        """
        entry_R, slot, count_e = assign_all_rows(chosen_TK, self.num_experts, 1, 1, self.kernels)
        x_RD, weights_R1, route = copy_rows(x_TD, weights_TK, entry_R, slot, self.kernels)
        return AllToAllExchange(InFlight(x_RD, None), InFlight(weights_R1, None), count_e, None, route, self.kernels)

    def assign(self, chosen_TK: Tensor, bin_rows: int) -> tuple[Tensor, Tensor, Tensor, Counts | None]:
        """Return the choice of each row and the rows of each choice; each expert's count; and the counts on their way,
        unless bins are padded."""
        if not bin_rows:
            entry_R, slot, count_E = assign_all_rows(chosen_TK, self.num_experts, self.ep, self.etp, self.kernels)
            return entry_R, slot, count_E, self.send_counts(count_E)
        order, count_E = sort_by_expert(chosen_TK, self.num_experts)
        most = self.num_experts * bin_rows * self.etp
        return *assign_rows(chosen_TK, order, count_E, self.ep, self.etp, bin_rows, most), count_E, None

    def send_counts(self, count_E: Tensor) -> Counts:
        """Send each rank of the group how many routed tokens its experts get from this one."""
        e = self.local_experts
        send_Ge = count_E.view(self.ep, 1, e).expand(-1, self.etp, -1).reshape(self.group.size, e)
        return Counts(send_Ge, self.group, device.kind(count_E) == "cuda")


class AllToAllExchange(NamedTuple):
    """Routed tokens and their routing weights on their way to this rank's experts, and back."""

    x_RD: InFlight
    weights_R1: InFlight | torch.dtype
    """Their dtype, if the rows are packed with them."""
    count_e: Tensor
    regroup: tuple[Tensor, Tensor] | None
    """The order (and its inverse) from by-sender to by-expert."""
    route: Route
    kernels: str

    def relay(self) -> AllToAllExchange:
        """Return itself: what it sends arrives at its goal."""
        return self

    @named("dispatch")
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        x_RD = arrive(self.x_RD)
        if isinstance(self.weights_R1, torch.dtype):
            return *reorder_packed(x_RD, *self.regroup, self.weights_R1), self.count_e
        weights_R1 = arrive(self.weights_R1)
        if self.regroup is not None:
            x_RD, weights_R1 = reorder_weighted(x_RD, weights_R1, *self.regroup, self.kernels)
        return x_RD, weights_R1, self.count_e

    def combine(self, y_RD: Tensor) -> Tensor:
        return self.receive(self.send_back(y_RD))

    @named("combine")
    def send_back(self, y_RD: Tensor) -> InFlight:
        if self.regroup is not None:
            y_RD = reorder(y_RD, *reversed(self.regroup), self.kernels)
        return send_back(y_RD, self.x_RD)

    @named("combine")
    def receive(self, back: InFlight) -> Tensor:
        return to_tokens(arrive(back), self.route.source_R, self.route.slot_TJ, self.kernels)
