"""The router: which experts a token visits, and with what weight. Called by the MoE layer.

logits = x W^T (+ bias), scores = score function of the logits, the top-k of scores + expert_bias are chosen, and the
weights are the chosen scores, normalised and scaled as the model says. Tokens may bring their experts along (routing
replay, arXiv 2510.11370): weights are then of these, counts still of the router's own choice.

Shapes: T tokens this rank owns, D model, E experts (number E: "no expert"), K top-k, B samples, S positions, N MoE
layers, P groups of experts, p experts of a group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import to_local_replicated
from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.router_product import product_by_terms, uses_terms
from titanmoe.moe.score_functions import score_function_of
from titanmoe.observe import named
from titanmoe.ops import counter_rng
from titanmoe.ops.autograd_functions import apply_function
from titanmoe.ops.kernels import fused
from titanmoe.tokens import NO_EXPERT, NOT_RECORDED, Tokens


class Router(nn.Module):
    """The router of one layer.

    `bias` is a trained parameter of the logits, which gpt-oss has. `expert_bias` only shifts the choice of experts, as
    in DeepSeek-V3: `titanmoe.moe.balance.update_expert_bias` moves it, and no gradient does.
    """

    def __init__(self, model: Model, options: MoEOptions, seed: int, layer: int, dtype: torch.dtype):
        super().__init__()
        self.model, self.options, self.seed, self.layer = model, options, seed, layer
        self.takes_routes = layer < model.num_layers
        """Whether tokens may bring the choice along: not for multi-token prediction."""
        self.score_function = score_function_of(model)
        self.wide = getattr(torch, options.router_dtype)
        stored = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.dim, dtype=stored))
        self.bias = nn.Parameter(torch.empty(model.num_experts, dtype=stored)) if model.router_bias else None
        # Added to the scores for the choice only; moved by titanmoe.moe.balance.update_expert_bias, not by a gradient.
        self.register_buffer("expert_bias", torch.zeros(model.num_experts, dtype=torch.float32))
        self.register_buffer("jitter_key", torch.zeros((), dtype=torch.int64), persistent=False)
        # Index of the layer in routes: a tensor, so that all layers have one graph.
        self.register_buffer("column", torch.zeros(1, dtype=torch.int64), persistent=False)

    def begin_step(self, step: int) -> None:
        """Set the key of the step's jitter, and the index of the layer in routes."""
        self.column.fill_(moe_blocks(self.model).index(self.layer))
        self.jitter_key.fill_(counter_rng.key("jitter", self.seed, step, self.layer))

    @named("router")
    def forward(self, x_TD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Route this rank's tokens, and write the router's own choice into `tokens.routes_TNK`, if that is not None.

        Call `begin_step` before the first forward of a step. With gradients, moe.jitter multiplies tokens by noise.

        Returns:
            Logits (T, E), scores (T, E), routing weights (T, K), chosen experts (T, K), E where a token is padding or
            its given route is NO_EXPERT, and counts of the router's own choices (B, E).
        """
        logits_TE = self._logits(x_TD, tokens.index_T)
        follows = tokens.given_TNK is not None and self.takes_routes  # the kernel chooses and weights in one
        in_kernel = (
            not follows
            and self.score_function.kernel_mode
            and self.score_function.scores_per_group <= 2
            and fused(self.options.kernels, logits_TE)
        )
        return logits_TE, *(self._fused if in_kernel else self._plain)(logits_TE, tokens)

    def _record(self, chosen_TK: Tensor, tokens: Tokens) -> None:
        """Write the router's own choice into its layer's place in `tokens.routes_TNK`, if that is not None.

        Does nothing in multi-token prediction.
        """
        if tokens.routes_TNK is not None and self.takes_routes:
            routes_T1K = chosen_TK.unsqueeze(1).to(tokens.routes_TNK.dtype)
            tokens.routes_TNK.index_copy_(1, self.column, routes_T1K)

    def _logits(self, x_TD: Tensor, index_T: Tensor) -> Tensor:
        """Return the logits (T, E), with the router's bias, in moe.router_dtype or x's dtype if that is wider.

        With gradients, tokens are multiplied by jitter, which `index_T`, their global indices, is for. Without jitter
        the product may be one of bfloat16 terms (`uses_terms`).
        """
        options, wide = self.options, torch.promote_types(x_TD.dtype, self.wide)
        noise = options.jitter > 0 and torch.is_grad_enabled()  # none in validation
        weight_ED = to_local_replicated(self.weight).to(wide)
        bias_E = None if self.bias is None else to_local_replicated(self.bias).to(wide)
        if not noise and uses_terms(options.router_product, x_TD, wide):
            logits_TE = product_by_terms(x_TD, weight_ED, options.kernels)
            return logits_TE if bias_E is None else logits_TE + bias_E
        x_TD = x_TD.to(wide)
        if noise:
            x_TD = x_TD * self._jitter(index_T, wide)
        return F.linear(x_TD, weight_ED, bias_E)

    def _plain(self, logits_TE: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Route tokens by plain operations of torch, without the kernel, whose reference this is; record the choice.

        Returns:
            Scores (T, E), routing weights (T, K), chosen experts (T, K), and counts of the router's own choices (B, E).
        """
        model, is_valid_T1 = self.model, tokens.valid_T.unsqueeze(1)
        scores_TE = self.score_function.scores(logits_TE)
        own_TK = chosen_TK = self._choose(scores_TE.detach(), tokens.index_T)
        has_expert = is_valid_T1
        if tokens.given_TNK is not None and self.takes_routes:
            given_TK = tokens.given_TNK.index_select(1, self.column).squeeze(1).to(torch.int64)
            has_expert = has_expert & (given_TK != NO_EXPERT)
            chosen_TK = own_TK.where(given_TK == NOT_RECORDED, given_TK.clamp(min=0))
        weights_TK = self.score_function.weights(logits_TE, scores_TE, chosen_TK)
        if model.norm_topk:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        own_TK = own_TK.where(is_valid_T1, model.num_experts)
        chosen_TK = chosen_TK.where(has_expert, model.num_experts)
        count_BE = count_choices(own_TK, tokens.sample_T, len(tokens.position_BS), model.num_experts)
        self._record(own_TK, tokens)
        return scores_TE, weights_TK * model.route_scale, chosen_TK, count_BE

    def _fused(self, logits_TE: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Route tokens by one Triton kernel, which ignores `tokens.given_TNK`, and record the choice as `_plain` does.

        Returns:
            Scores (T, E), routing weights (T, K), chosen experts (T, K), and counts of choices (B, E).
        """
        from titanmoe.ops.kernels.route import SCORE_KERNELS, RouteFunction

        model, of = self.model, (tokens.index_T, tokens.sample_T, tokens.valid_T, len(tokens.position_BS))
        mode = SCORE_KERNELS[self.score_function.kernel_mode]
        groups = (model.num_groups, model.top_groups, self.score_function.scores_per_group)
        how = (mode, model.norm_topk, float(model.route_scale), self.options.force_balance)
        scores_TE, weights_TK, chosen_TK, count_BE = apply_function(
            RouteFunction, logits_TE, self.expert_bias, *of, model.top_k, *groups, *how
        )
        self._record(chosen_TK, tokens)
        return scores_TE, weights_TK, chosen_TK, count_BE

    def _choose(self, scores_TE: Tensor, index_T: Tensor) -> Tensor:
        """Return the top-k experts (T, K) by score plus expert_bias, best first; round-robin ones if balance is forced.

        Of equal scores the lower expert number comes first. With model.num_groups the experts are those of the best
        groups. Round-robin goes by `index_T`, the tokens' global indices, and looks at no score.
        """
        model = self.model
        if self.options.force_balance:
            choice_TK = index_T.unsqueeze(1) * model.top_k + torch.arange(model.top_k, device=index_T.device)
            return choice_TK % model.num_experts
        scores_TE = scores_TE + self.expert_bias.to(scores_TE.dtype)
        if model.num_groups > 1:
            scores_TE = self._best_groups(scores_TE)
        # A stable sort, because topk does not define the order of equal scores: the lower expert number always wins.
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, : model.top_k]

    def _best_groups(self, scores_TE: Tensor) -> Tensor:
        """Return scores_TE with -inf for experts outside of each token's `model.top_groups` best groups of experts.

        A group is rated by the sum of its best scores, as many as the score function's `scores_per_group`.
        """
        model = self.model
        scores_TPp = scores_TE.unflatten(1, (model.num_groups, -1))
        best = min(self.score_function.scores_per_group, scores_TPp.shape[-1])
        group_TP = scores_TPp.topk(best, dim=-1).values.sum(-1)
        keep = group_TP.sort(dim=-1, descending=True, stable=True).indices[:, : model.top_groups]
        outside_TP = torch.ones_like(group_TP, dtype=torch.bool).scatter(1, keep, False)
        return scores_TPp.masked_fill(outside_TP.unsqueeze(-1), -torch.inf).flatten(1)

    def _jitter(self, index_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Return factors (T, D) uniform in 1 +- moe.jitter, drawn by seed, step, layer and the token's global index."""
        dim = torch.arange(self.model.dim, device=index_T.device)
        noise_TD = counter_rng.uniform(self.jitter_key, index_T.unsqueeze(1) * self.model.dim + dim, dtype)
        return 1 + self.options.jitter * (2 * noise_TD - 1)


def count_choices(chosen_TK: Tensor, sample_T: Tensor, samples: int, num_experts: int) -> Tensor:
    """Return how often the tokens of each sample chose each expert: (B, E). Number E, of padding, is not counted.

    `sample_T` is each token's sample within the microbatch, 0 to `samples` - 1.
    """
    bucket = (sample_T.unsqueeze(1) * (num_experts + 1) + chosen_TK).flatten()
    count = bucket.new_zeros(samples * (num_experts + 1)).scatter_add_(0, bucket, torch.ones_like(bucket))
    return count.view(samples, -1)[:, :num_experts]
