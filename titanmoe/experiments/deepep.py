"""The dispatcher `deepep`: sends tokens by the kernels of DeepEP (github.com/deepseek-ai/DeepEP, package `deep_ep`).

A token goes once to every rank that has any of its experts, along with the experts and weights of its choices there.
Each rank sends back one row, summed over its experts, and the kernel adds the rows of all ranks. The kernel of
`combine` is also the backward of `dispatch`, and vice versa. Not run on GPUs yet; tests emulate the package.

Shapes: T tokens this rank owns, D model, K top-k, J = K * etp choices of a token, E experts, e of them local, G ranks
of the dispatch group, N tokens that arrive here, each once, C = N * J choices with X = 1 slot each, S slots, R routed
tokens of this rank's experts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.dispatchers.allgather import SummedExchange
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, Exchange, ExpertRanks, SharedBuffers
from titanmoe.moe.send_slots import assign_slots, fill_slots, sort_by_expert
from titanmoe.observe import named
from titanmoe.ops import device as devices

NEEDS = "cuda"
"""The device type that its kernels run on."""
INSTALL = "build it as https://github.com/deepseek-ai/DeepEP says"
"""The advice of error messages."""


class DeepEPBuffers(SharedBuffers):
    """The communication buffer of DeepEP that all MoE layers of a rank share.

    Creating an instance is collective over the dispatch group.
    """

    def __init__(self, dim: int, group: Group, device: torch.device):
        super().__init__(device)
        from deep_ep import Buffer

        width, ranks = 2 * dim, group.size  # bytes of a token
        options = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
        self.buffer = Buffer(
            group.process_group,
            max(option.get_nvl_buffer_size_hint(width, ranks) for option in options),
            max(option.get_rdma_buffer_size_hint(width, ranks) for option in options),
        )


class DeepEP(Dispatcher):
    """The dispatcher that sends tokens by DeepEP's kernels during a training step.

    Outside a training step, and in a group of one rank, it works as AllToAll.
    """

    memory: DeepEPBuffers | None

    @staticmethod
    def missing(device: str) -> str:
        if devices.is_imitated():
            return "no fake group has the kernels of DeepEP"
        try:
            import deep_ep
        except ImportError as error:
            return f"the package deep_ep cannot be loaded ({error}): {INSTALL}"
        if not hasattr(deep_ep, "Buffer"):
            return f"the package deep_ep has no Buffer: {INSTALL}"
        return "" if devices.kind_of_setting(device) == NEEDS else f"DeepEP runs on GPUs alone, and this is {device}"

    @staticmethod
    def reserve(
        model: Model, options: MoEOptions, ranks: ExpertRanks, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> DeepEPBuffers | None:
        return DeepEPBuffers(model.dim, ranks.group, device) if ranks.group.size > 1 else None

    def place(self, ranks: ExpertRanks) -> None:
        super().place(ranks)
        self.plain = AllToAll(self.num_experts, self.kernels)
        self.plain.place(ranks)

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> Exchange:
        """Send each token once to each rank that has experts it chose, wait, and copy arrivals to a slot per choice.

        Collective over the dispatch group. The host waits for counts.

        Args:
            x_TD: this rank's tokens.
            weights_TK: the routing weights of each token's chosen experts.
            chosen_TK: the numbers of each token's chosen experts among all ranks' experts; E for no expert.
            slots_per_expert: used only where it works as AllToAll: slots of an expert for each sending rank if expert
                buffers are padded, else 0.
        """
        if self.memory is None:
            return self.plain.dispatch(x_TD, weights_TK, chosen_TK, slots_per_expert)
        weights_TJ = weights_TK.repeat_interleave(self.etp, 1)
        chosen_TJ = self.expand_over_etp(chosen_TK)
        x_ND, weights_NJ, chosen_NJ, counts, handle = _Dispatch.apply(
            x_TD.contiguous(), weights_TJ, chosen_TJ, self.memory.buffer, self.num_experts * self.etp
        )
        chosen_NJ = chosen_NJ.where(chosen_NJ >= 0, self.local_experts)
        order_C, count_e = sort_by_expert(chosen_NJ, self.local_experts)
        choice_S, slot_CX = assign_slots(
            chosen_NJ, order_C, count_e, ep=1, etp=1, slots_per_expert=0, num_slots=sum(counts)
        )
        x_RD, weights_R1, route = fill_slots(x_ND, weights_NJ, choice_S, slot_CX, self.kernels)
        return_sums = partial(_Combine.apply, self.memory.buffer, handle)
        return SummedExchange(x_RD, weights_R1, count_e, route, return_sums, self.kernels)

    def expand_over_etp(self, chosen_TK: Tensor) -> Tensor:
        """Return the choices of tokens with an entry for each etp rank of a chosen expert, (T, J), for DeepEP.

        Each rank's shard of an expert is numbered as an expert of its own; -1 stands for no expert.

        Args:
            chosen_TK: the numbers of each token's chosen experts among all ranks' experts; E for no expert.
        """
        rank_TK1, place_TK1 = (
            x.unsqueeze(2) for x in (chosen_TK // self.local_experts, chosen_TK % self.local_experts)
        )
        copy = torch.arange(self.etp, device=chosen_TK.device)
        number = (rank_TK1 * self.etp + copy) * self.local_experts + place_TK1
        return number.where(rank_TK1 < self.ep, -1).flatten(1)


class _Dispatch(torch.autograd.Function):
    """DeepEP's dispatch with its backward, DeepEP's combine.

    Its outputs: the received tokens (N, D); their routing weights and chosen local experts (N, J), -1 for a choice on
    another rank; the number of each local expert's tokens; and DeepEP's handle for sending results back.
    """

    @staticmethod
    def forward(ctx, x_TD, weights_TJ, chosen_TJ, buffer, experts):
        per_rank, per_node, per_expert, visits_TG, _ = buffer.get_dispatch_layout(chosen_TJ, experts)
        x_ND, chosen_NJ, weights_NJ, counts, handle, _ = buffer.dispatch(
            x_TD,
            topk_idx=chosen_TJ,
            topk_weights=weights_TJ,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=visits_TG,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(chosen_NJ)
        return x_ND, weights_NJ, chosen_NJ, counts, handle

    @staticmethod
    def backward(ctx, grad_ND, grad_NJ, *_):
        grad_TD, grad_TJ, _ = ctx.buffer.combine(grad_ND.contiguous(), ctx.handle, topk_weights=grad_NJ.contiguous())
        return grad_TD, grad_TJ, None, None, None


class _Combine(torch.autograd.Function):
    """DeepEP's combine with its backward, DeepEP's dispatch.

    It sends each received token's sum over this rank's experts back to the token's rank, which adds the sums of all
    ranks.
    """

    @staticmethod
    def forward(ctx, buffer, handle, y_ND):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y_ND.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx, grad_TD):
        return None, None, ctx.buffer.dispatch(grad_TD.contiguous(), handle=ctx.handle)[0]
