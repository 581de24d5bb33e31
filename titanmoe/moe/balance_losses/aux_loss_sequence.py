"""Even loads within each sample (DeepSeek-V3, arXiv 2412.19437): the mean over samples of sum f * mean p."""

from __future__ import annotations

from torch import Tensor

from titanmoe.moe.balance_losses.balance_loss import BalanceLoss, Routed


class AuxLossSequence(BalanceLoss):
    def forward(self, routed: Routed) -> Tensor:
        choices_BE = routed.choices()
        choices_B1 = choices_BE.sum(1, keepdim=True).clamp(min=1)
        constant_BE = choices_BE / choices_B1.square() * (self.model.num_experts * self.model.top_k)
        return (routed.shares() * (constant_BE / routed.step_samples)).sum()
