"""The interface of balance losses: terms of the objective that depend on what a layer's router does.

A new loss is a subclass of `BalanceLoss` with its own `forward` and its `spec`, and a line in
`titanmoe/moe/balance_losses/balance_spec.py`; outside the package it needs no line. In `aux_losses.py` `ZLoss` is the
shortest, and `AuxLossGlobal` has state between microbatches.

Shapes: B samples of a microbatch, T tokens this rank owns, E experts.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.tokens import Tokens


@dataclass(eq=False)
class RouterOutput:
    """The router's output for one microbatch on one rank, from which balance losses are computed.

    (torch 2.11 cannot compile a group as a field's default.)
    """

    logits_TE: Tensor
    scores_TE: Tensor
    count_BE: Tensor
    """The number of times this rank's tokens chose each expert, before dropping."""
    tokens: Tokens
    step_tokens: Tensor
    """The number of tokens of the step (all ranks and microbatches) without padding: float64, at least 1."""
    step_samples: Tensor
    """The number of samples of the step (all ranks and microbatches), at least 1."""
    normalises: bool
    """Whether a token's scores still have to be scaled to add up to 1 (`ScoreFunction.scores_sum_to_one`)."""
    sequence: Group
    """The ranks that own other tokens of the same samples (cp x tp)."""
    data: Group
    """The ranks with other samples (dp_replicate x dp_shard)."""
    kernels: str = "auto"
    """The option `[moe] kernels`."""

    def __post_init__(self) -> None:
        self._valid_T: Tensor | None = None
        self._choices_BE: Tensor | None = None
        self._fractions_BE: Tensor | None = None

    @property
    def valid_T(self) -> Tensor:
        """The mask of tokens: 0 for padding, else 1, in the dtype of the scores.

        Padding has logits and scores too, so every sum over tokens needs this mask.
        """
        if self._valid_T is None:
            self._valid_T = self.tokens.valid_T.to(self.scores_TE.dtype)
        return self._valid_T

    def choice_counts(self) -> Tensor:
        """Return how often each sample's tokens chose each expert, (B, E), in float64, without a gradient.

        Counts the tokens of the full samples, on all ranks of `sequence`: the first call of a microbatch is collective
        over these, and further calls return the same tensor.
        """
        if self._choices_BE is None:
            self._choices_BE = all_reduce(self.count_BE.to(torch.float64), self.sequence)
        return self._choices_BE

    def score_sums(self) -> Tensor:
        """Return the scores of this rank's tokens, scaled to add up to 1 per token, summed over each sample: (B, E).

        Differentiable. Padding does not count. Further calls return the same tensor.
        """
        if self._fractions_BE is None:
            B, E = self.count_BE.shape
            factor_T = self.valid_T / self.scores_TE.sum(-1) if self.normalises else self.valid_T
            self._fractions_BE = (factor_T.view(B, 1, -1) @ self.scores_TE.view(B, -1, E)).squeeze(1)
        return self._fractions_BE


class BalanceLoss(nn.Module):
    """The base class of balance losses. Each MoE layer has an instance of each loss that is switched on.

    State that lasts for a step belongs in buffers (`register_buffer(..., persistent=False)`), which are 0 before the
    first step. The result must depend neither on the mapping nor on recomputation. So write state at the index of the
    microbatch and never add to it: forward may run again, in any order, and has to give the same result.
    """

    def __init__(self, model: Model, options: MoEOptions, microbatches: int):
        """Store model and options. `microbatches`, for subclasses, is the number that this rank computes in a pass."""
        super().__init__()
        self.model, self.options = model, options

    def begin_step(self) -> None:
        """Reset state that lasts for a step; do nothing here. Called before the first microbatch of each step."""

    def begin_pass(self) -> None:
        """Prepare state for another forward and backward within the same step, with microbatches numbered from 0 again.

        Does nothing here; a loss with state by microbatch adds that state to a sum over the step. Called before each
        pass but the first (titanmoe.session).
        """

    @abstractmethod
    def forward(self, routed: RouterOutput) -> Tensor:
        """Return this rank's summand of the loss for one microbatch, a differentiable scalar without the coefficient.

        The sum of the summands over all ranks and microbatches of a step is the loss, and the sum of their gradients
        its gradient: what other ranks computed is a constant here.
        """
        raise NotImplementedError
