"""What a balance loss is: a term of the objective that depends on what a layer's router does.

A new loss is a subclass of `BalanceLoss` with its own `forward` and its `spec`, and a line in
`titanmoe/moe/balance_losses/balance_spec.py`; outside the package it needs no line. `z_loss.py` is the shortest;
`AuxLossGlobal` in `aux_losses.py` keeps state between microbatches.

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
    """What the router knows of a microbatch, on one rank. (torch 2.11 cannot compile a group as a field's default.)"""

    logits_TE: Tensor
    scores_TE: Tensor
    count_BE: Tensor
    """How often this rank's tokens chose each expert, before dropping."""
    tokens: Tokens
    step_tokens: Tensor
    """How many tokens the whole step has (all ranks and microbatches) without padding: a float64 scalar, at least 1."""
    step_samples: Tensor
    """How many samples it has."""
    normalises: bool
    """Whether a token's scores still have to be scaled to add up to 1 (`ScoreFunction.scores_sum_to_one`)."""
    sequence: Group
    """The ranks that own other tokens of the same samples (cp x tp)."""
    data: Group
    """The ranks with other samples (dp_replicate x dp_shard)."""
    kernels: str = "auto"
    """`[moe] kernels`."""

    def __post_init__(self) -> None:
        self._valid_T: Tensor | None = None
        self._choices_BE: Tensor | None = None
        self._shares_BE: Tensor | None = None

    @property
    def valid_T(self) -> Tensor:
        """0 for padding, else 1. Padding has logits and scores too, so every sum over tokens needs it."""
        if self._valid_T is None:
            self._valid_T = self.tokens.valid_T.to(self.scores_TE.dtype)
        return self._valid_T

    def choice_counts(self) -> Tensor:
        """(B, E): the counts of whole samples, in float64, without a gradient. Summed over the ranks once, for all
        losses."""
        if self._choices_BE is None:
            self._choices_BE = all_reduce(self.count_BE.to(torch.float64), self.sequence)
        return self._choices_BE

    def score_sums(self) -> Tensor:
        """(B, E): the scores of this rank's tokens, each token's scaled to add up to 1, summed over the tokens of each
        sample. Computed once, for all losses."""
        if self._shares_BE is None:
            B, E = self.count_BE.shape
            factor_T = self.valid_T / self.scores_TE.sum(-1) if self.normalises else self.valid_T
            self._shares_BE = (factor_T.view(B, 1, -1) @ self.scores_TE.view(B, -1, E)).squeeze(1)
        return self._shares_BE


class BalanceLoss(nn.Module):
    """One for each layer. State that lasts for a step belongs in buffers (`register_buffer(..., persistent=False)`),
    which are 0 before the first step.

    The result must depend neither on the mapping nor on recomputation. So write state at the index of the microbatch
    and never add to it: forward may run again, in any order, and has to give the same result.
    """

    def __init__(self, model: Model, options: MoEOptions, microbatches: int):
        """microbatches: how many a step has on this rank."""
        super().__init__()
        self.model, self.options = model, options

    def begin_step(self) -> None:
        """Called before the first microbatch of a step."""

    @abstractmethod
    def forward(self, routed: RouterOutput) -> Tensor:
        """This rank's summand of the term, a scalar with its gradient, without the coefficient.

        Summed over all ranks and microbatches of a step, these give the whole term, and their gradients its gradient:
        what other ranks computed is a constant here.
        """
        raise NotImplementedError
