"""Even loads over all data ranks and the step's microbatches so far (arXiv 2501.11873)."""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe.comm.collectives import all_reduce
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.balance_losses.balance_loss import BalanceLoss, Routed


class AuxLossGlobal(BalanceLoss):
    """M: microbatches of a step."""

    def __init__(self, model: Model, options: MoEOptions, microbatches: int):
        super().__init__(model, options, microbatches)
        # Integers, because a running sum of floating-point numbers is not deterministic on GPUs.
        count_ME = torch.zeros(microbatches, model.num_experts, dtype=torch.int64)
        self.register_buffer("count_ME", count_ME, persistent=False)

    def begin_step(self) -> None:
        self.count_ME.zero_()

    def forward(self, routed: Routed) -> Tensor:
        m = routed.tokens.microbatch.view(1)
        count_1E = all_reduce(routed.choices().sum(0, keepdim=True), routed.data)
        self.count_ME.index_copy_(0, m, count_1E.to(torch.int64))
        so_far_1E = self.count_ME.cumsum(0).index_select(0, m)
        choices = so_far_1E.sum(dtype=torch.float64).clamp(min=1)
        constant_1E = so_far_1E / choices * self.model.num_experts
        return (routed.shares() * (constant_1E / routed.step_tokens)).sum()
