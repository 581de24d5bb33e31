"""What a balance loss is: a term of the objective that depends on what a layer's router does.

A new one is a subclass of `BalanceLoss` with its own `forward` and its `rules`, and a line in
`titanmoe/moe/balance_losses/rules.py`; outside the package it needs no line. `z_loss.py` is the shortest one,
`aux_loss_global.py` one with a state.

Shapes: B samples of a microbatch, T tokens this rank owns, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, Group, all_reduce
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.tokens import Tokens


@dataclass(eq=False)
class Routed:
    """What the router knows of a microbatch, on one rank."""

    logits_TE: Tensor
    scores_TE: Tensor
    count_BE: Tensor
    """How often this rank's tokens chose each expert, before dropping."""
    tokens: Tokens
    step_tokens: Tensor
    """Tokens that are not padding of the whole step: all ranks and microbatches, at least 1, a scalar in float64."""
    step_samples: Tensor
    """The same of its samples."""
    normalises: bool
    """Whether the scores of a token do not add up to 1 yet (sigmoid)."""
    sequence: Group = NO_GROUP
    """The ranks that own other tokens of the same samples (cp x tp)."""
    data: Group = NO_GROUP
    """The ranks with other samples (dp_replicate x dp_shard)."""

    def __post_init__(self) -> None:
        self.valid_T = self.tokens.valid_T.to(self.scores_TE.dtype)
        """0 for padding, else 1. Padding has logits and scores too, so every sum over tokens needs it."""
        self._choices_BE: Tensor | None = None
        self._shares_BE: Tensor | None = None

    def choices(self) -> Tensor:
        """(B, E): the counts of whole samples, in float64 and without a gradient. One message for all that ask."""
        if self._choices_BE is None:
            self._choices_BE = all_reduce(self.count_BE.to(torch.float64), self.sequence)
        return self._choices_BE

    def shares(self) -> Tensor:
        """(B, E): the scores of this rank's tokens, each token's adding up to 1, summed over each sample's tokens. One
        product for all that ask."""
        if self._shares_BE is None:
            B, E = self.count_BE.shape
            factor_T = self.valid_T / self.scores_TE.sum(-1) if self.normalises else self.valid_T
            self._shares_BE = (factor_T.view(B, 1, -1) @ self.scores_TE.view(B, -1, E)).squeeze(1)
        return self._shares_BE


class BalanceLoss(nn.Module):
    """One for each layer. A state for the step belongs in buffers (`register_buffer(..., persistent=False)`), which are
    0 before the first one.

    Numbers must depend neither on the mapping nor on what is computed twice. So a state is written at the index of
    the microbatch, never added to: forward may run again, in any order, and then has to give the same.
    """

    def __init__(self, model: Model, options: MoEOptions, microbatches: int):
        """microbatches: of a step on this rank."""
        super().__init__()
        self.model, self.options = model, options

    def begin_step(self) -> None:
        """Called before the first microbatch of a step."""

    def forward(self, routed: Routed) -> Tensor:
        """This rank's summand of the term, a scalar with its gradient, without the coefficient.

        The sum over all ranks and microbatches of a step is the whole term, and the sum of their gradients its
        gradient: the value that other ranks computed is a constant here.
        """
        raise NotImplementedError
