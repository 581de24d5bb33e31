"""The dispatcher `allgather`: every rank of ep x etp gets all tokens of the group and takes those of its experts.

A reduce-scatter brings sums back. Per rank and direction: T * (G - 1) rows of D elements for any top_k, as many for
each rank. Useful for a group of about two, or if top_k is near ep.

Shapes: T tokens this rank owns, N = T * G tokens of the dispatch group's G ranks, D model, K top-k, E experts, e local
experts, C = N * K choices with X = 1 slot each, J = K slots of a token, R routed tokens of this rank's experts. Slots
are filled after the tokens have arrived, so those of `titanmoe.moe.send_slots`, S, are R.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.comm.collectives import all_gather, all_gather_autograd, reduce_scatter_autograd
from titanmoe.comm.host_sync import HostCopy
from titanmoe.moe.dispatchers.dispatcher import Dispatcher
from titanmoe.moe.permute import unpermute_tokens
from titanmoe.moe.send_slots import Route, assign_slots, fill_slots, local_choices, sort_by_expert
from titanmoe.observe import named


class AllGather(Dispatcher):
    """The dispatcher that gathers all tokens of the dispatch group on every rank."""

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> SummedExchange:
        """Gather the tokens of the dispatch group, wait, and copy a routed token for each choice of a local expert.

        Collective over the dispatch group. The host waits for the number of routed tokens, unless expert buffers are
        padded: then each has `slots_per_expert` slots for each sending rank.
        """
        slots_per_expert *= self.group.size
        chosen_NK, order_C, count_e, number = self.gather_and_sort_choices(chosen_TK, slots_per_expert)
        # The host waits while these are in flight. Rows are copies of what arrives, so nothing can be laid out earlier.
        x_ND = all_gather_autograd(x_TD, 0, self.group)
        weights_NK = all_gather_autograd(weights_TK, 0, self.group, small=True)
        rows = self.local_experts * slots_per_expert if number is None else number.read()  # the layer's only host sync
        choice_S, slot_CX = assign_slots(
            chosen_NK, order_C, count_e, ep=1, etp=1, slots_per_expert=slots_per_expert, num_slots=rows
        )
        x_RD, weights_R1, route = fill_slots(x_ND, weights_NK, choice_S, slot_CX, self.kernels)
        count_e = torch.full_like(count_e, slots_per_expert) if slots_per_expert else count_e
        return_sums = partial(reduce_scatter_autograd, dim=0, group=self.group)
        return SummedExchange(x_RD, weights_R1, count_e, route, return_sums, self.kernels)

    def gather_and_sort_choices(
        self, chosen_TK: Tensor, slots_per_expert: int
    ) -> tuple[Tensor, Tensor, Tensor, HostCopy | None]:
        """Gather the choices of all ranks, and sort those of this rank's experts. Collective over the dispatch group.

        Args:
            chosen_TK: the global numbers of each token's chosen experts; E for no expert.
            slots_per_expert: not 0 if expert buffers are padded.

        Returns:
            The chosen experts of all tokens, numbered among this rank's experts (N, K), e for an expert of another
            rank; the choices sorted by expert; the number of choices of each local expert (e,); and the sum of these
            numbers, while it is copied to the host, or None if expert buffers are padded.
        """
        chosen_NK = all_gather(chosen_TK, 0, self.group)
        chosen_NK = local_choices(chosen_NK, self.group.rank // self.etp, self.local_experts)
        order_C, count_e = sort_by_expert(chosen_NK, self.local_experts)
        return chosen_NK, order_C, count_e, None if slots_per_expert else HostCopy(count_e.sum())


class SummedExchange(NamedTuple):
    """The exchange of dispatchers that send a token to a rank once, for all of the rank's experts that it chose.

    The rank sums its experts' outputs by token before it sends the sums back.
    """

    x_RD: Tensor
    weights_R1: Tensor
    count_e: Tensor
    route: Route
    return_sums: Callable[[Tensor], Tensor]
    """A function that sends back this rank's sums by token, and returns each own token's sum over all ranks.

    It takes one sum for each of the N received tokens, (N, D), and returns one for each of the T own tokens, (T, D).
    """
    kernels: str

    def receive_routed(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x_RD, self.weights_R1, self.count_e

    @named("combine")
    def combine(self, y_RD: Tensor) -> Tensor:
        return self.return_sums(unpermute_tokens(y_RD, self.route.source_S, self.route.slot_TJ, self.kernels))
