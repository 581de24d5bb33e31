"""Keeping experts evenly busy: auxiliary losses, selection bias, and the counts that both and the metrics need.

With p_te a token's normalised score, count_e the choices (before dropping) and f_e = E * count_e / (K * tokens):

    sequence     mean over the step's samples of     sum_e f_e(sample) * mean_t p_te
    microbatch   token-weighted mean over microbatches of  sum_e f_e(microbatch) * mean_t p_te
    global       the same with f_e over all data ranks and the step's microbatches so far
    z            mean over the step's tokens of logsumexp(logits)^2

f is a constant, so each rank sums p over its own tokens only, and the sum over ranks is the whole. Each of the first
three is 1 under uniform routing. A forward writes its counts indexed by microbatch, so a recomputed forward, whenever
it runs, writes the same values again.

Shapes: M microbatches of a step, X statistics, B samples of a microbatch, T owned tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, Group, all_reduce
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.ops.kernels import fused
from titanmoe.tokens import Tokens

AUX = ("aux_loss_sequence", "aux_loss", "aux_loss_global", "z_loss")
STATISTICS = (*AUX, "entropy", "tokens", "dropped")


class _Attach(torch.autograd.Function):
    """Returns x unchanged; in backward the auxiliary loss, which is already scaled, receives the gradient 1."""

    @staticmethod
    def forward(ctx, x, aux):
        ctx.save_for_backward(aux)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (aux,) = ctx.saved_tensors
        return grad, torch.ones_like(aux)


def shares(scores_TE: Tensor, normalise: bool) -> Tensor:
    """Scores of a token that add up to 1."""
    return scores_TE / scores_TE.sum(-1, keepdim=True) if normalise else scores_TE


def entropy_and_count(scores_TE: Tensor, valid_T: Tensor, normalise: bool, kernels: str = "auto") -> Tensor:
    """(1, 2): the entropy of the tokens that are not padding, and their number."""
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
        self.normalises = model.score_function == "sigmoid"
        self.coefficients = {name: getattr(options, name) for name in AUX if getattr(options, name)}
        self.sequence: Group = NO_GROUP  # cp x tp: ranks that own tokens of the same samples
        self.data: Group = NO_GROUP  # dp_replicate x dp_shard

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
            self.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)

        buffer("count_ME", microbatches, model.num_experts)  # this rank's
        buffer("statistics_MX", microbatches, len(STATISTICS))  # this rank's
        buffer("global_ME", microbatches, model.num_experts)  # all data ranks'
        buffer("step_tokens")  # routed tokens of the whole step, all ranks
        buffer("step_samples")

    def begin_step(self, tokens: Tensor, samples: int) -> None:
        for buffer in (self.count_ME, self.statistics_MX, self.global_ME):
            buffer.zero_()
        self.step_tokens.copy_(tokens).clamp_(min=1)
        self.step_samples.fill_(samples)

    def forward(
        self, weights_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, count_BE: Tensor, tokens: Tokens
    ) -> Tensor:
        """Returns the routing weights with the gradient of the auxiliary losses attached."""
        terms = self._terms(scores_TE, logits_TE, count_BE, tokens)
        with torch.no_grad():
            m = tokens.microbatch.view(1)
            self.count_ME.index_copy_(0, m, count_BE.sum(0, keepdim=True, dtype=torch.float64))
            row_1X = entropy_and_count(scores_TE, tokens.valid_T, self.normalises, self.kernels)
            self.statistics_MX[:, len(AUX) : -1].index_copy_(0, m, row_1X)
            for name, term in terms.items():
                self.statistics_MX[:, AUX.index(name)].index_copy_(0, m, term.view(1).to(torch.float64))
        if not terms:
            return weights_TK
        first, *others = terms.values()
        return _Attach.apply(weights_TK, sum(others, first))

    def _terms(self, scores_TE: Tensor, logits_TE: Tensor, count_BE: Tensor, tokens: Tokens) -> dict[str, Tensor]:
        """This rank's summand of each term, times its coefficient.

        Every valid token has K choices, so f_e is E times the share of choices, and a balance term is a sum of p times
        constants.
        """
        E, K = self.model.num_experts, self.model.top_k
        coefficients, microbatch = self.coefficients, tokens.microbatch
        if not coefficients:
            return {}
        valid_T, constants, terms = tokens.valid_T.to(scores_TE.dtype), {}, {}
        if any(name in coefficients for name in AUX[:3]):
            count_BE = all_reduce(count_BE.to(torch.float64), self.sequence)
            factor_T = valid_T / scores_TE.sum(-1) if self.normalises else valid_T
            p_BE = (factor_T.view(len(count_BE), 1, -1) @ scores_TE.view(len(count_BE), -1, E)).squeeze(1)
        if "aux_loss_sequence" in coefficients:
            choices_B1 = count_BE.sum(1, keepdim=True).clamp(min=1)
            constants["aux_loss_sequence"] = count_BE / choices_B1.square() * (E * K) / self.step_samples
        if "aux_loss" in coefficients:
            count_E = count_BE.sum(0)
            constants["aux_loss"] = count_E / count_E.sum().clamp(min=1) * E / self.step_tokens
        if "aux_loss_global" in coefficients:
            count_1E = all_reduce(count_BE.sum(0, keepdim=True), self.data)
            self.global_ME.index_copy_(0, microbatch.view(1), count_1E)
            so_far_1E = self.global_ME.cumsum(0).index_select(0, microbatch.view(1))
            constants["aux_loss_global"] = so_far_1E / so_far_1E.sum().clamp(min=1) * E / self.step_tokens
        for name, constant in constants.items():
            terms[name] = (p_BE * (coefficients[name] * constant)).sum()
        if "z_loss" in coefficients:
            z = (logits_TE.logsumexp(-1).square() * valid_T).sum()
            terms["z_loss"] = coefficients["z_loss"] * z / self.step_tokens
        return terms

    def dropped(self, entries: Tensor, microbatch: Tensor) -> None:
        """Record how many of this rank's choices were over capacity."""
        self.statistics_MX[:, -1].index_copy_(0, microbatch.view(1), entries.view(1).to(torch.float64))
