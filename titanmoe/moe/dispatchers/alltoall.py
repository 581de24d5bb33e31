"""The dispatcher `alltoall`: each token goes only to the ranks of its experts, by one all-to-all there and one back.

    one rank has all experts     nothing is sent, and the host does not wait (`dispatch_locally`)
    padded expert buffers        equal splits, known without a message: no host sync
    dropless                     ranks first send each other their counts, which the host reads to split the message

Shapes: T tokens this rank owns, D model, K top-k, E experts, e local experts, G ranks of the
dispatch group (ep x etp), S slots of this rank's send buffer, R routed tokens that it receives for its experts, C = T *
K choices of an expert, X = etp copies of a choice, J = K * X copies of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.comm import interleave
from titanmoe.comm.all_to_all import InFlight, finish_all_to_all, start_all_to_all, start_reverse_all_to_all
from titanmoe.comm.host_sync import CountExchange
from titanmoe.moe.dispatchers.dispatcher import Dispatcher
from titanmoe.moe.permute import can_pack, reorder, reorder_and_unpack, reorder_weighted, unpermute_tokens
from titanmoe.moe.send_slots import (
    Route,
    assign_slots,
    assign_unpadded_slots,
    fill_slots,
    order_by_expert,
    sort_by_expert,
    truncate_buffer,
    truncate_route,
)
from titanmoe.observe import named
from titanmoe.ops import device


class AllToAll(Dispatcher):
    """The dispatcher that sends each routed token to all etp ranks of its expert in one all-to-all.

    Each of these ranks returns its summand of the down projection, and the sum over top-k on the token's rank adds
    these too, so that expert tensor parallelism costs no extra collective. Per rank and direction: T * K * etp rows of
    D elements, less those that stay on the rank.
    """

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> AllToAllExchange:
        """Start to send routed tokens to their experts' ranks. Collective over the dispatch group.

        In four steps: assign a slot of the send buffer to each choice, fill the slots, learn from the counts how the
        buffer splits over ranks (in a compiled graph before it is filled), send.

        The host waits for counts, unless expert buffers are padded or `dispatch_locally` applies.

        Args:
            x_TD: this rank's tokens.
            weights_TK: the routing weights of each token's chosen experts.
            chosen_TK: the numbers of each token's chosen experts; E for no expert.
            slots_per_expert: the slots of a padded expert buffer for each sending rank; 0 for buffers without padding.
        """
        G, e = self.group.size, self.local_experts
        waiting_costs = device.choose(x_TD, True, cpu=False, compiled=True)  # on GPUs, where kernels are queued
        if G == 1 and not slots_per_expert and self.allows_unused_slots and waiting_costs:
            return self.dispatch_locally(x_TD, weights_TK, chosen_TK)
        choice_S, slot_CX, count_E, counts = self.assign(chosen_TK, slots_per_expert)
        in_graph = counts is not None and torch.compiler.is_compiling()
        if in_graph:  # the used size is known before the buffer is filled
            count_Ge, send, receive = counts.read()
            choice_S, slot_CX = choice_S.narrow(0, 0, sum(send)), slot_CX.clamp(max=sum(send))
        # Rows that are reordered when they arrive are packed with their weights, and unpacked, on the way.
        packed = G > 1 and e > 1 and can_pack(x_TD, self.kernels)
        x_SD, weights_S1, route = fill_slots(x_TD, weights_TK, choice_S, slot_CX, self.kernels, packed)
        if counts is None:  # padded: the same size to and from every rank
            send = receive = [e * slots_per_expert] * G
            count_Ge = count_E.new_full((G, e), slots_per_expert)
        elif not in_graph:  # the buffer was filled while counts were in flight; drop what is unused
            interleave.yield_in_backward(x_SD)
            count_Ge, send, receive = counts.read()  # the layer's only host sync
            x_SD, route = truncate_buffer(x_SD, sum(send)), truncate_route(route, sum(send))
            weights_S1 = None if packed else truncate_buffer(weights_S1, sum(send))
        x_RD = start_all_to_all(x_SD, self.group, send, receive)
        weights_R1 = None if packed else start_all_to_all(weights_S1, self.group, send, receive, small=True)
        expert_order = order_by_expert(count_Ge, sum(receive), self.kernels) if G > 1 and e > 1 else None
        count_e = count_Ge.sum(0) if G > 1 else count_Ge[0]
        return AllToAllExchange(
            x_RD=x_RD,
            weights_R1=weights_R1,
            weights_dtype=weights_TK.dtype,
            count_e=count_e,
            expert_order=expert_order,
            route=route,
            kernels=self.kernels,
        )

    def dispatch_locally(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> AllToAllExchange:
        """Copy tokens into the slots of their experts on a rank that has all experts, without a host sync.

        Nothing is sent: experts receive the slots of the send buffer. It has the largest possible size, since the host
        does not know how much is used. Unused slots come last; what experts compute of them is undefined and reaches no
        token. In `chosen_TK` number E is no expert.
        """
        choice_S, slot_CX, count_e = assign_unpadded_slots(chosen_TK, self.num_experts, 1, 1, self.kernels)
        x_SD, weights_S1, route = fill_slots(x_TD, weights_TK, choice_S, slot_CX, self.kernels)
        x_RD, weights_R1 = InFlight(x_SD, None), InFlight(weights_S1, None)
        return AllToAllExchange(
            x_RD=x_RD,
            weights_R1=weights_R1,
            weights_dtype=weights_TK.dtype,
            count_e=count_e,
            expert_order=None,
            route=route,
            kernels=self.kernels,
        )

    def assign(self, chosen_TK: Tensor, slots_per_expert: int) -> tuple[Tensor, Tensor, Tensor, CountExchange | None]:
        """Assign a slot of the send buffer to each choice of an expert.

        Collective over the dispatch group, unless expert buffers are padded (`slots_per_expert` is not 0).

        Returns:
            The choice in each slot (S,); the slots of each choice (C, X); the number of choices of each expert (E,);
            and the started exchange of counts, None if expert buffers are padded.
        """
        if not slots_per_expert:
            choice_S, slot_CX, count_E = assign_unpadded_slots(
                chosen_TK, self.num_experts, self.ep, self.etp, self.kernels
            )
            return choice_S, slot_CX, count_E, self.send_counts(count_E)
        order_C, count_E = sort_by_expert(chosen_TK, self.num_experts)
        most = self.num_experts * slots_per_expert * self.etp
        return (
            *assign_slots(
                chosen_TK, order_C, count_E, ep=self.ep, etp=self.etp, slots_per_expert=slots_per_expert, num_slots=most
            ),
            count_E,
            None,
        )

    def send_counts(self, count_E: Tensor) -> CountExchange:
        """Start to tell each rank of the dispatch group how many routed tokens this rank sends to its experts.

        Collective over the dispatch group. `count_E` has the number of this rank's choices of each expert.
        """
        e = self.local_experts
        send_Ge = count_E.view(self.ep, 1, e).expand(-1, self.etp, -1).reshape(self.group.size, e)
        return CountExchange(send_Ge, self.group, device.kind(count_E) == "cuda")


class AllToAllExchange(NamedTuple):
    """An exchange by all-to-all: routed tokens and their weights in flight, then experts' outputs in flight back."""

    x_RD: InFlight
    """The routed tokens: sent from the S slots of each rank's send buffer, and R when they are received."""
    weights_R1: InFlight | None
    """The routing weights of the routed tokens; None if each is packed behind its routed token in `x_RD`."""
    weights_dtype: torch.dtype
    count_e: Tensor
    expert_order: tuple[Tensor, Tensor] | None
    """The permutation that sorts received routed tokens, which come by sender, by expert; and its inverse.

    None if they arrive sorted by expert.
    """
    route: Route
    kernels: str

    def relay(self) -> AllToAllExchange:
        """Return this exchange itself: routed tokens reach their experts without an intermediate rank."""
        return self

    @named("dispatch")
    def receive_routed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the routed tokens of this rank's experts, and return them sorted by expert. Called once.

        Returns:
            The routed tokens (R, D), their routing weights (R, 1) and the number of each expert's (e,). In padded
                expert buffers empty slots count too.
        """
        x_RD = finish_all_to_all(self.x_RD)
        if self.weights_R1 is None:
            return *reorder_and_unpack(x_RD, *self.expert_order, self.weights_dtype), self.count_e
        weights_R1 = finish_all_to_all(self.weights_R1)
        if self.expert_order is not None:
            x_RD, weights_R1 = reorder_weighted(x_RD, weights_R1, *self.expert_order, self.kernels)
        return x_RD, weights_R1, self.count_e

    def combine(self, y_RD: Tensor) -> Tensor:
        """Send the experts' outputs back, wait, and return each own token's sum of them (T, D).

        Collective over the dispatch group. `y_RD` has the order of `receive_routed`.
        """
        return self.finish_combine(self.start_combine(y_RD))

    @named("combine")
    def start_combine(self, y_RD: Tensor) -> InFlight:
        """Start to send the experts' outputs back to the ranks of their tokens. Collective over the dispatch group.

        `y_RD` has the order of `receive_routed`.
        """
        if self.expert_order is not None:
            y_RD = reorder(y_RD, *reversed(self.expert_order), self.kernels)
        return start_reverse_all_to_all(y_RD, self.x_RD)

    @named("combine")
    def finish_combine(self, in_flight: InFlight) -> Tensor:
        """Wait for the experts' outputs from `start_combine`, and return each token's sum of them (T, D)."""
        y_SD = finish_all_to_all(in_flight)
        return unpermute_tokens(y_SD, self.route.source_S, self.route.slot_TJ, self.kernels)
