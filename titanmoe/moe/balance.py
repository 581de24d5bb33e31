"""Keeps the experts evenly busy: applies the balance losses, and counts what they, the selection bias and the metrics
need.

With p_te a token's normalised score, count_e the choices (before dropping) and f_e = E * count_e / (K * tokens):

    aux_loss_sequence  mean over the step's samples of     sum_e f_e(sample) * mean_t p_te
    aux_loss           token-weighted mean over microbatches of  sum_e f_e(microbatch) * mean_t p_te
    aux_loss_global    the same with f_e over all data ranks and the step's microbatches so far
    z_loss             mean over the step's tokens of logsumexp(logits)^2

Every valid token has K choices, so f_e is E times the share of choices. f is a constant, so each rank sums p over its
own tokens only, and the sum over ranks is the whole. Each of the first three is 1 under uniform routing. A forward
writes its counts indexed by microbatch, so a recomputed forward, whenever it runs, writes the same values again.

Shapes: M microbatches of a step, X statistics, B samples of a microbatch, T owned tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.balance_losses.protocol import Routed
from titanmoe.moe.balance_losses.rules import BALANCE_LOSSES, switched_on
from titanmoe.moe.score_functions import score_function_of
from titanmoe.ops.kernels import fused
from titanmoe.tokens import Tokens

ROUTING = ("entropy", "tokens", "dropped")


def statistics(options: MoEOptions) -> tuple[str, ...]:
    """Names of what a layer records per microbatch besides rows per expert: the losses that are on, then ROUTING."""
    return (*(term.metric for term in switched_on(options)), *ROUTING)


class _Attach(torch.autograd.Function):
    """Returns x unchanged; in backward, gives each term its coefficient as its gradient."""

    @staticmethod
    def forward(ctx, x, coefficients, *terms):
        ctx.save_for_backward(coefficients)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (coefficients,) = ctx.saved_tensors
        return grad, None, *coefficients.unbind()


def shares(scores_TE: Tensor, normalise: bool) -> Tensor:
    """Each token's scores, made to add up to 1 unless they do already."""
    return scores_TE / scores_TE.sum(-1, keepdim=True) if normalise else scores_TE


def entropy_and_count(scores_TE: Tensor, valid_T: Tensor, normalise: bool, kernels: str = "auto") -> Tensor:
    """(1, 2): the summed entropy of the tokens that are not padding, and how many there are."""
    if fused(kernels, scores_TE) and not torch.compiler.is_compiling():
        from titanmoe.ops.kernels.score_spread import entropy_and_count as sums

        return sums(scores_TE, valid_T, normalise).sum(0, keepdim=True)
    valid_T = valid_T.to(scores_TE.dtype)
    entropy = torch.special.entr(shares(scores_TE, normalise)).sum(-1) @ valid_T
    return torch.stack((entropy, valid_T.sum())).to(torch.float64).unsqueeze(0)


class Balance(nn.Module):
    def __init__(self, model: Model, options: MoEOptions, microbatches: int):
        super().__init__()
        self.model, self.kernels = model, options.kernels
        self.normalises = not score_function_of(model).scores_sum_to_one
        on = switched_on(options)
        self.coefficients = tuple(term.coefficient for term in on)
        kinds = (BALANCE_LOSSES.implementation(term.name) for term in on)
        self.losses = nn.ModuleList(kind(model, options, microbatches) for kind in kinds)
        self.sequence: Group = NO_GROUP  # cp x tp: ranks that own tokens of the same samples
        self.data: Group = NO_GROUP  # dp_replicate x dp_shard

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
            self.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)

        buffer("count_ME", microbatches, model.num_experts)  # this rank's
        buffer("statistics_MX", microbatches, len(on) + len(ROUTING))  # this rank's
        buffer("coefficients_X", len(on))
        buffer("step_tokens")  # routed tokens of the whole step, all ranks
        buffer("step_samples")

    def begin_step(self, tokens: Tensor, samples: Tensor | int) -> None:
        for buffer in (self.count_ME, self.statistics_MX):
            buffer.zero_()
        self.step_tokens.copy_(tokens).clamp_(min=1)
        self.step_samples.fill_(samples).clamp_(min=1)
        for loss, coefficient, value in zip(self.losses, self.coefficients, self.coefficients_X, strict=True):
            value.fill_(coefficient)
            loss.begin_step()

    def forward(
        self, weights_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, count_BE: Tensor, tokens: Tokens
    ) -> Tensor:
        """Returns the routing weights with the gradient of the balance losses attached."""
        terms = self._terms(scores_TE, logits_TE, count_BE, tokens)
        with torch.no_grad():
            m = tokens.microbatch.view(1)
            self.count_ME.index_copy_(0, m, count_BE.sum(0, keepdim=True, dtype=torch.float64))
            row_1X = entropy_and_count(scores_TE, tokens.valid_T, self.normalises, self.kernels)
            self.statistics_MX[:, -len(ROUTING) : -1].index_copy_(0, m, row_1X)
            for x, (term, coefficient) in enumerate(zip(terms, self.coefficients, strict=True)):
                value = (coefficient * term).to(torch.float64)
                self.statistics_MX[:, x].index_copy_(0, m, value.view(1))
        return _Attach.apply(weights_TK, self.coefficients_X, *terms) if terms else weights_TK

    def _terms(self, scores_TE: Tensor, logits_TE: Tensor, count_BE: Tensor, tokens: Tokens) -> list[Tensor]:
        """This rank's summand of each term, without its coefficient."""
        if not self.losses:
            return []
        step, groups = (self.step_tokens, self.step_samples), (self.sequence, self.data)
        routed = Routed(logits_TE, scores_TE, count_BE, tokens, *step, self.normalises, *groups)
        return [loss(routed) for loss in self.losses]

    def dropped(self, entries: Tensor, microbatch: Tensor) -> None:
        """Records how many of this rank's choices were over capacity."""
        self.statistics_MX[:, -1].index_copy_(0, microbatch.view(1), entries.view(1).to(torch.float64))
