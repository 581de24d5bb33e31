"""The z loss, which keeps logits small (ST-MoE, arXiv 2202.08906): the mean over tokens of logsumexp(logits)^2.

Chosen by moe.z_loss, called by titanmoe.moe.balance. It is the shortest balance loss.

Shapes: T owned tokens, E experts.
"""

from __future__ import annotations

from torch import Tensor

from titanmoe.moe.balance_losses.balance_loss import BalanceLoss, RouterOutput


class ZLoss(BalanceLoss):
    def forward(self, routed: RouterOutput) -> Tensor:
        return (routed.logits_TE.logsumexp(-1).square() * routed.valid_T).sum() / routed.step_tokens
