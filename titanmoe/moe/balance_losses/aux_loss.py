"""Even loads within each microbatch of a data rank (Switch, arXiv 2101.03961)."""

from __future__ import annotations

from torch import Tensor

from titanmoe.moe.balance_losses.balance_loss import BalanceLoss, Routed


class AuxLoss(BalanceLoss):
    def forward(self, routed: Routed) -> Tensor:
        count_E = routed.choices().sum(0)
        constant_E = count_E / count_E.sum().clamp(min=1) * self.model.num_experts
        return (routed.shares() * (constant_E / routed.step_tokens)).sum()
