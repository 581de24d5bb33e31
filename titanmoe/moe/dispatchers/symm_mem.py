"""The dispatcher `symm_mem`: writes routed tokens into the memory of their experts' ranks, over NVLink.

All ranks gather how many routed tokens each has for each expert; `symmetric_places` computes from it, on the device,
where each belongs in the receive buffer of its expert's rank. So the host never waits. If any rank would receive more
than its buffer holds, no rank sends, a flag is set, and the step is repeated without buffers, exactly.

Shapes: T tokens this rank owns, D model, K top-k, J choices of a token, E experts, e local experts, C = T * K choices
with X = etp slots each, S = C * X slots of the send buffer, the unused ones last, R slots of the receive buffer, a
multiple of ALIGN for every expert. G ranks as senders, P as receivers. A place is rank * limit + slot; -1 is nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.comm.collectives import NO_GROUP, all_gather
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, Exchange, ExpertRanks
from titanmoe.moe.dispatchers.symmetric_buffers import SymmetricBuffers, exchange, missing
from titanmoe.moe.dispatchers.symmetric_places import places
from titanmoe.moe.permute import unpermute_tokens
from titanmoe.moe.send_slots import Route, assign_unpadded_slots, fill_slots
from titanmoe.observe import named


class Symmetric(Dispatcher):
    """The dispatcher that writes routed tokens into the memory of their experts' ranks.

    It does so during a training step; elsewhere, where an overflow could not be repeated, it works as AllToAll.
    """

    memory: SymmetricBuffers | None

    @staticmethod
    def missing(device: str) -> str:
        return missing(device)

    @staticmethod
    def reserve(
        model: Model, options: MoEOptions, ranks: ExpertRanks, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> SymmetricBuffers:
        return SymmetricBuffers(model, options, ranks, tokens, dtype, device)

    def place(self, ranks: ExpertRanks) -> None:
        """Set the ranks that hold this layer's experts, and place `plain`, the AllToAll for outside training steps."""
        super().place(ranks)
        self.plain = AllToAll(self.num_experts, self.kernels)
        self.plain.allows_unused_slots = True
        self.plain.place(ranks)

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> Exchange:
        """Write routed tokens into the receive buffers of their experts' ranks, without a host sync.

        Collective over the dispatch group. The experts get the full receive buffer, in which unused slots are zero;
        their outputs for these may be anything. If the routed tokens for any rank do not fit, nothing is sent, and that
        rank sets `needs_repeat`. While `memory` is None, the routed tokens go by AllToAll.

        `slots_per_expert` is 0, because pad_to_capacity is refused with this dispatcher.
        """
        memory = self.memory
        if memory is None or self.group == NO_GROUP:
            return self.plain.dispatch(x_TD, weights_TK, chosen_TK, slots_per_expert)
        rows = chosen_TK.numel() * self.etp
        choice_S, slot_CX, count_E = assign_unpadded_slots(chosen_TK, self.num_experts, self.ep, self.etp, self.kernels)
        count_GE = all_gather(count_E, 0, self.group).view(-1, self.num_experts)
        to_S, from_R, slots_e, fits, overflows = places(count_GE, self.ranks, memory.limit, rows, memory.receive_slots)
        memory.needs_repeat.logical_or_(overflows)
        # If not, no row is sent and no token has one, so that everything stays finite until the flag is read.
        x_SD, weights_S1, route = fill_slots(x_TD, weights_TK, choice_S, slot_CX.where(fits, rows), self.kernels)
        x_RD, weights_R1 = exchange((x_SD, weights_S1), to_S, from_R, memory.name)
        return SymmetricExchange(
            x_RD=x_RD,
            weights_R1=weights_R1,
            slots_e=slots_e,
            memory=memory.name,
            to_S=to_S,
            from_R=from_R,
            route=route,
            kernels=self.kernels,
        )


class SymmetricExchange(NamedTuple):
    """The received routed tokens of this rank's experts, and the places to which the experts' outputs go back."""

    x_RD: Tensor
    weights_R1: Tensor
    slots_e: Tensor
    memory: str
    to_S: Tensor
    from_R: Tensor
    route: Route
    kernels: str

    def receive_routed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the routed tokens of this rank's experts, which have arrived, with unused slots.

        Returns:
            The slots of the receive buffer (R, D), sorted by expert; their routing weights (R, 1); and the number of
            each expert's slots (e,), its unused ones included. Slots after the last expert's belong to none.
        """
        return self.x_RD, self.weights_R1, self.slots_e

    @named("combine")
    def combine(self, y_RD: Tensor) -> Tensor:
        """Write outputs into the same receive buffers of their tokens' ranks; return each own token's sum (T, D).

        Collective over the dispatch group. `y_RD` has outputs of all R slots; those of unused ones are not sent.
        """
        (y_SD,) = exchange((y_RD,), self.from_R, self.to_S, self.memory)
        return unpermute_tokens(y_SD, self.route.source_S, self.route.slot_TJ, self.kernels)
