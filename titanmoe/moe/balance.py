"""Keep the experts evenly busy: apply the balance losses and move the routers' expert_bias.

With p_te a token's normalised score, count_e the choices (before dropping) and f_e = E * count_e / (K * tokens), which
is constant in backward, so that each rank sums p over its own tokens only. The first two are 1 under uniform routing:

    aux_loss_sequence, aux_loss  mean over samples, or over microbatches weighted by tokens, of sum_e f_e * mean_t p_te
    aux_loss_global              the same with f_e over all data ranks and the step's microbatches so far; 1 as well
    z_loss                       mean over the step's tokens of logsumexp(logits)^2

Shapes: B samples of a microbatch, T owned tokens, E experts, K top-k, X balance losses that are on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.balance_losses.balance_loss import RouterOutput
from titanmoe.moe.balance_losses.balance_spec import BALANCE_LOSSES, active_losses
from titanmoe.moe.layer_statistics import RowLayout, StepCounts
from titanmoe.moe.router import Router
from titanmoe.moe.score_functions import score_function_of
from titanmoe.tokens import Tokens


class _Attach(torch.autograd.Function):
    """An identity on x, whose backward gives each balance loss its coefficient as its gradient.

    So the losses are trained without being added to the objective.
    """

    @staticmethod
    def forward(ctx, x, coefficients, *terms):
        ctx.save_for_backward(coefficients)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (coefficients,) = ctx.saved_tensors
        return grad, None, *coefficients.unbind()


class Balance(nn.Module):
    """The balance losses of one MoE layer, and the counts of a step for the layer's metrics."""

    def __init__(self, model: Model, options: MoEOptions, microbatches: int):
        super().__init__()
        self.kernels = options.kernels
        self.normalises = not score_function_of(model).scores_sum_to_one
        on = active_losses(options)
        self.coefficients = tuple(term.coefficient for term in on)
        kinds = (BALANCE_LOSSES.implementation(term.name) for term in on)
        self.losses = nn.ModuleList(kind(model, options, microbatches) for kind in kinds)
        self.sequence: Group = NO_GROUP  # cp x tp: ranks that own tokens of the same samples
        self.data: Group = NO_GROUP  # dp_replicate x dp_shard

        def buffer(name: str, *shape: int) -> None:
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64), persistent=False)

        self.counts = StepCounts(RowLayout.of(model.num_experts, options), microbatches)
        buffer("coefficients_X", len(on))
        buffer("step_tokens")  # tokens of the whole step without padding, all ranks
        buffer("step_samples")

    def begin_step(self, tokens: Tensor, samples: Tensor | int) -> None:
        """Reset the counts of the step before, and store the numbers of the new step's tokens and samples.

        Both are of all ranks and microbatches, tokens without padding.
        """
        self.counts.begin_step()
        self.step_tokens.copy_(tokens).clamp_(min=1)
        self.step_samples.fill_(samples).clamp_(min=1)
        for loss, coefficient, value in zip(self.losses, self.coefficients, self.coefficients_X, strict=True):
            value.fill_(coefficient)
            loss.begin_step()

    def begin_pass(self) -> None:
        """Prepare for another forward and backward within the same step, whose microbatches are numbered from 0 again.

        Moves the counts of the microbatches so far into the step's sums, so that they are not overwritten.
        """
        self.counts.begin_pass()
        for loss in self.losses:
            loss.begin_pass()

    def forward(
        self, weights_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, count_BE: Tensor, tokens: Tokens
    ) -> Tensor:
        """Attach the gradients of the balance losses to the routing weights, and record the microbatch's counts.

        Collective over the ranks that the losses count over: those of the same samples, and of all data ranks. A model
        in eval mode, such as one that generates, does neither and sends nothing.

        Args:
            weights_TK: routing weights.
            scores_TE: score function of the logits.
            count_BE: how often tokens of each sample chose each expert, on this rank.

        Returns:
            The routing weights (T, K) with unchanged values; their backward also gives the router the balance losses'
            gradients.
        """
        if not self.training:
            return weights_TK
        routed = RouterOutput(
            logits_TE=logits_TE,
            scores_TE=scores_TE,
            count_BE=count_BE,
            tokens=tokens,
            step_tokens=self.step_tokens,
            step_samples=self.step_samples,
            normalises=self.normalises,
            sequence=self.sequence,
            data=self.data,
            kernels=self.kernels,
        )
        terms = [loss(routed) for loss in self.losses]
        with torch.no_grad():
            self.counts.record_routed(routed)
            for name, term, coefficient in zip(self.counts.layout.losses, terms, self.coefficients, strict=True):
                self.counts.record(tokens.microbatch, (name,), coefficient * term)
        return _Attach.apply(weights_TK, self.coefficients_X, *terms) if terms else weights_TK


@torch.no_grad()
def update_expert_bias(routers: Mapping[int, Router], loads: Mapping[int, Tensor], rate: float) -> None:
    """Move each router's expert_bias by `rate`, in place: up for experts below the mean load, down for those above.

    Frozen routers are left out, and nothing happens if `rate` is 0. `loads` has how often each expert was chosen in the
    step on all ranks, (E,); both dicts are by the number of the layer's block. Sends nothing.
    """
    for number, router in routers.items() if rate else ():
        if not router.weight.requires_grad:  # a frozen router chooses as it did
            continue
        load_E = loads[number]
        router.expert_bias += (rate * torch.sign(load_E.mean() - load_E)).to(torch.float32)
