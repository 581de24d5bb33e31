"""Load-balancing losses, for even loads within each sample, each microbatch or the whole step, and the z loss.

Each of the former is the mean of E * sum over experts of f * P: f is the fraction of choices that fall on an expert,
counted over the loss's scope and constant in backward, and P the mean score of tokens for it.

Shapes: B samples of a microbatch, E experts, P = 1 + microbatches of a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe.comm.collectives import all_reduce
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.balance_losses.balance_loss import BalanceLoss, RouterOutput


class AuxLossSequence(BalanceLoss):
    """Balance loss for even loads within each sample (DeepSeek-V3, arXiv 2412.19437).

    It is the mean over samples of E * sum over experts of f * P, both taken over the sample's tokens.
    """

    def forward(self, routed: RouterOutput) -> Tensor:
        choices_BE = routed.choice_counts()
        choices_B1 = choices_BE.sum(1, keepdim=True).clamp(min=1)
        constant_BE = choices_BE / choices_B1.square() * (self.model.num_experts * self.model.top_k)
        return (routed.score_sums() * (constant_BE / routed.step_samples)).sum()


class AuxLoss(BalanceLoss):
    """Balance loss for even loads within each microbatch of a data rank (Switch, arXiv 2101.03961)."""

    def forward(self, routed: RouterOutput) -> Tensor:
        count_E = routed.choice_counts().sum(0)
        constant_E = count_E / count_E.sum().clamp(min=1) * self.model.num_experts
        return (routed.score_sums() * (constant_E / routed.step_tokens)).sum()


class AuxLossGlobal(BalanceLoss):
    """Balance loss for even loads over all data ranks and the step's microbatches so far (arXiv 2501.11873).

    The microbatch itself is included. The first row of P has the counts of the step's earlier passes.
    """

    def __init__(self, model: Model, options: MoEOptions, microbatches: int):
        super().__init__(model, options, microbatches)
        # Integers, because a running sum of floating-point numbers is not deterministic on GPUs.
        counts_PE = torch.zeros(1 + microbatches, model.num_experts, dtype=torch.int64)
        self.register_buffer("counts_PE", counts_PE, persistent=False)

    def begin_step(self) -> None:
        self.counts_PE.zero_()

    def begin_pass(self) -> None:
        earlier_E = self.counts_PE.sum(0)
        self.counts_PE.zero_()
        self.counts_PE[0] = earlier_E

    def forward(self, routed: RouterOutput) -> Tensor:
        m = routed.tokens.microbatch.view(1)
        count_1E = all_reduce(routed.choice_counts().sum(0, keepdim=True), routed.data)
        self.counts_PE[1:].index_copy_(0, m, count_1E.to(torch.int64))
        so_far_1E = self.counts_PE.cumsum(0)[1:].index_select(0, m)
        choices = so_far_1E.sum(dtype=torch.float64).clamp(min=1)
        constant_1E = so_far_1E / choices * self.model.num_experts
        return (routed.score_sums() * (constant_1E / routed.step_tokens)).sum()


class ZLoss(BalanceLoss):
    """Loss that keeps logits small (ST-MoE, arXiv 2202.08906): the mean over tokens of logsumexp(logits)^2."""

    def forward(self, routed: RouterOutput) -> Tensor:
        return (routed.logits_TE.logsumexp(-1).square() * routed.valid_T).sum() / routed.step_tokens
