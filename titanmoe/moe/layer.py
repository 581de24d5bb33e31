"""The MoE layer: route, dispatch, experts, combine.

It gets the tokens that this rank alone owns, and does not know how attention was laid on the ranks. A transformer block
calls it (titanmoe.models.transformer).

Shapes: B samples, s owned positions, T = B * s owned tokens, D model, E experts, e local experts, K top-k, R routed
tokens of this rank's experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.balance import Balance
from titanmoe.moe.capacity import Capacity
from titanmoe.moe.dispatchers.dispatcher import Exchange
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.moe.experts import Experts
from titanmoe.moe.halves import accept_exchanges
from titanmoe.moe.router import Router
from titanmoe.observe import region
from titanmoe.tokens import Tokens


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer, with an optional shared expert."""

    def __init__(
        self,
        model: Model,
        options: MoEOptions,
        *,
        shared: nn.Module | None,
        seed: int,
        layer: int,
        microbatches: int,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.router = Router(model, options, seed, layer, dtype)
        self.balance = Balance(model, options, microbatches)
        self.capacity = Capacity(model, options) if options.capacity_factor else None
        kind = DISPATCHERS.implementation(options.dispatcher)
        self.dispatcher = kind(model.num_experts, options.kernels)
        self.dispatcher.allows_unused_slots = not model.expert_linear_bias
        self.experts = Experts(model, options, dtype)
        if options.overlap == "halves":
            accept_exchanges(self.experts)
        self.shared = shared
        self.pad = options.pad_to_capacity

    def begin_step(self, step: int, tokens: Tensor, samples: Tensor | int) -> None:
        """Reset the counts and caches of the step before, and set the router's keys and the balance losses' totals.

        Args:
            step: the number of the step.
            tokens: the number of tokens in the whole step, on all ranks, without padding.
            samples: the number of samples in the whole step, on all ranks.
        """
        self.router.begin_step(step)
        self.balance.begin_step(tokens, samples)
        self.experts.rounded.begin_step()

    def forward(self, x_BsD: Tensor, tokens: Tokens) -> Tensor:
        """Return the weighted sum of each token's experts, plus the shared expert's output: (B, s, D).

        Collective over the dispatch group, by the shared expert over tp, and as `route` is.
        """
        x_TD = x_BsD.flatten(0, 1)
        weights_TK, chosen_TK, slots_per_expert = self.route(x_TD, tokens)
        exchange = self.dispatch(x_TD, tokens, weights_TK, chosen_TK, slots_per_expert)
        shared_BsD = self.run_shared(x_BsD, tokens)  # while routed tokens are in flight
        y_RD = self.experts(*exchange.receive_routed())  # of (R, D), weights (R, 1) and counts (e,)
        y_BsD = exchange.combine(y_RD).view_as(x_BsD)  # only a sum: experts have multiplied by the weights
        return y_BsD if shared_BsD is None else y_BsD + shared_BsD

    def route(self, x_TD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, int]:
        """Choose each token's experts, drop choices over capacity, and attach the gradients of the balance losses.

        Records the microbatch's counts for metrics. Collective over cp x tp if `[moe] capacity_scope` is full_sequence,
        and over the groups whose tokens a balance loss counts.

        Returns:
            The routing weights (T, K); the chosen experts (T, K), E for a dropped choice; and the slots per expert and
            sender if expert buffers are padded, else 0.
        """
        logits_TE, scores_TE, weights_TK, chosen_TK, count_BE = self.router(x_TD, tokens)
        # The same weights, to which the gradients of the balance losses are attached.
        weights_TK = self.balance(weights_TK, logits_TE, scores_TE, count_BE, tokens)
        if self.capacity is None:
            return weights_TK, chosen_TK, 0
        samples = count_BE.shape[0]
        within_TK = self.capacity(chosen_TK, weights_TK, tokens, samples)
        self.balance.counts.record(tokens.microbatch, ("dropped",), (within_TK != chosen_TK).sum())
        return weights_TK, within_TK, self.capacity.slots_per_expert(samples, x_TD.shape[0]) if self.pad else 0

    # Both are methods so that dropout of adapters can wrap them, which reads the tokens.
    def dispatch(
        self, x_TD: Tensor, tokens: Tokens, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int
    ) -> Exchange:
        """Start to send these tokens to their experts' ranks; return the exchange, from which to receive and combine.

        Collective over the dispatch group; the host may wait for counts. Routing weights, chosen experts and slots are
        what `route` returned; the tokens' metadata is for dropout of adapters.
        """
        return self.dispatcher.dispatch(x_TD, weights_TK, chosen_TK, slots_per_expert)

    def run_shared(self, x_BsD: Tensor, tokens: Tokens) -> Tensor | None:
        """Return the shared expert's output (B, s, D); None if the layer has no shared expert. Collective over tp.

        The tokens' metadata is for dropout of adapters.
        """
        if self.shared is None:
            return None
        with region("shared expert"):
            return self.shared(x_BsD)
