"""A kernel from logits to routing in one pass: scores, choice, weights, and counts of choices by sample and expert.

Reference: `titanmoe.moe.router.Router._plain`. A program has a few tokens and all their experts. Backward, with s the
scores, r the chosen ones' weights before normalisation, g their gradient, S the sum of r over the chosen:

    normalised   g = (g - sum g * r / S) / S
    softmax      dlogit = s * (g - sum s * g)
    sigmoid      dlogit = s * (1 - s) * g

Shapes: T tokens, E experts (P: rounded up to a power of two), K top-k, G groups, B samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import cdiv, expert_tile, kernel, next_power_of_2

TILE = 512
"""The scores per program. It is one warp, so that no sum or choice over the experts has to wait for another warp."""
SCORE_KERNELS = {"softmax": 0, "sigmoid": 1, "softmax_after_topk": 2}
"""The formulas that the kernel has, which score functions name (`ScoreFunction.kernel_mode`).

Another needs its scores in `_route_forward`, its gradient in `_route_backward`, and its routing weights, if they are
not the scores, in `_unnormalised` and in the backward of these."""
_SIGMOID, _AFTER = tl.constexpr(SCORE_KERNELS["sigmoid"]), tl.constexpr(SCORE_KERNELS["softmax_after_topk"])


@triton.jit
def _softmax(x):
    """Return the softmax along the rows of a tile. Elements of -inf get 0, also where a full row is -inf."""
    top = tl.max(x, 1)[:, None]
    e = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(e, 1)[:, None]
    return e / tl.where(total == 0, 1.0, total)


@triton.jit
def _largest(key, columns):
    """Return the column of each row's largest number, the first among equals: (tokens, 1).

    Args:
        key: the numbers.
        columns: the numbers of the columns, a row.
    """
    return tl.min(tl.where(key == tl.max(key, 1)[:, None], columns, key.shape[1]), 1)[:, None]


@triton.jit
def _best_groups(key, e, E: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TOP: tl.constexpr, TWO: tl.constexpr):
    """Return a mask of the experts in the TOP best groups of each token.

    A group is rated by the sum of its two best keys if TWO, else by its best key.

    Args:
        key: score plus expert_bias of each expert.
        e: the numbers of the experts.
        GP: G rounded up to a power of two.
        TOP: the number of groups to choose.
        TWO: whether two keys rate a group.
    """
    SIZE: tl.constexpr = E // G
    group = tl.arange(0, GP)[None, :]
    value = tl.full([key.shape[0], GP], float("-inf"), key.dtype)
    for g in range(G):
        group_keys = tl.where((e // SIZE == g) & (e < E), key, float("-inf"))
        best = tl.max(group_keys, 1)
        if TWO:
            best += tl.max(tl.where(e == _largest(group_keys, e), float("-inf"), group_keys), 1)
        value = tl.where(group == g, best[:, None], value)
    keep = key != key
    for _ in range(TOP):
        first = _largest(value, group)
        value = tl.where(group == first, float("-inf"), value)
        keep = keep | (e // SIZE == first)
    return keep


@triton.jit
def _unnormalised(logits, scores, chosen, MODE: tl.constexpr):
    """Return the routing weights of chosen experts before they are scaled to sum to 1; 0 for other experts.

    Args:
        chosen: a mask of the chosen experts.
        MODE: the score function, a value of SCORE_KERNELS.
    """
    return _softmax(tl.where(chosen, logits, float("-inf"))) if MODE == _AFTER else tl.where(chosen, scores, 0.0)


@triton.jit(do_not_specialize=["T"])
def _route_forward(logits, bias, index, sample, valid, scores, weights, chosen, count, T, E: tl.constexpr,
                   P: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, G: tl.constexpr,
                   GP: tl.constexpr, TOP: tl.constexpr, TWO: tl.constexpr, MODE: tl.constexpr, NORM: tl.constexpr,
                   FORCED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = t < T
    e, k = tl.arange(0, P)[None, :], tl.arange(0, KP)[None, :]
    place, inside = t[:, None] * E + e, in_range[:, None] & (e < E)
    x = tl.load(logits + place, mask=inside, other=0.0)
    masked = tl.where(e < E, x, float("-inf"))
    s = 1 / (1 + tl.exp(-x)) if MODE == _SIGMOID else _softmax(masked)
    tl.store(scores + place, s, mask=inside)

    choice = tl.zeros([ROWS, KP], dtype=tl.int64)
    is_chosen = (e < 0) & in_range[:, None]
    if FORCED:
        first_choice = tl.load(index + t, mask=in_range, other=0)[:, None] * K
        for j in range(K):
            number = (first_choice + j) % E
            is_chosen = is_chosen | (e == number)
            choice = tl.where(k == j, number, choice)
    else:
        key = s + tl.load(bias + e, mask=e < E, other=0.0).to(s.dtype)
        # torch sorts NaN before all numbers; here its index must stay within the table
        key = tl.where(key != key, float("inf"), key)
        key = tl.where(e < E, key, float("-inf"))
        if G > 1:
            keep = _best_groups(key, e, E, G, GP, TOP, TWO)
            key = tl.where(keep, key, float("-inf"))
        for j in range(K):
            number = _largest(key, e)
            here = e == number
            key = tl.where(here, float("-inf"), key)
            is_chosen = is_chosen | here
            choice = tl.where(k == j, number.to(tl.int64), choice)

    raw = _unnormalised(x, s, is_chosen, MODE)
    if NORM:
        raw = raw / (tl.sum(raw, 1)[:, None] + 1e-20)
    raw = raw * SCALE
    weight = tl.zeros([ROWS, KP], dtype=s.dtype)
    for j in range(K):
        number = tl.sum(tl.where(k == j, choice, 0), 1)[:, None]
        weight = tl.where(k == j, tl.sum(tl.where(e == number, raw, 0.0), 1)[:, None], weight)
    # As the number that is counted: sums of booleans become popcounts of bits that go through local memory.
    real = tl.load(valid.to(tl.pointer_type(tl.int8)) + t, mask=in_range, other=0).to(tl.int64)[:, None]
    out, written = t[:, None] * K + k, in_range[:, None] & (k < K)
    tl.store(weights + out, weight, mask=written)
    tl.store(chosen + out, tl.where(real != 0, choice, E), mask=written)

    # A program's tokens are mostly from one sample: one sum per sample that it touches.
    of = tl.load(sample + t, mask=in_range, other=-1)
    b, last = tl.min(tl.where(in_range, of, tl.max(of, 0)), 0), tl.max(of, 0)
    while b <= last:
        added = tl.sum(tl.where(is_chosen & (of == b)[:, None], real, 0), 0)
        tl.atomic_add(count + b * E + tl.arange(0, P), added, mask=(tl.arange(0, P) < E) & (added > 0), sem="relaxed")
        b += 1


@triton.jit(do_not_specialize=["T"])
def _route_backward(grad_scores, grad_weights, logits, scores, chosen, out, T, E: tl.constexpr, P: tl.constexpr,
                    SCALE: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr, NORM: tl.constexpr,
                    OF_SCORES: tl.constexpr, OF_WEIGHTS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = t < T
    e = tl.arange(0, P)[None, :]
    place, inside = t[:, None] * E + e, in_range[:, None] & (e < E)
    s = tl.load(scores + place, mask=inside, other=0.0)
    grad = tl.zeros([ROWS, P], dtype=s.dtype)
    if OF_SCORES:
        grad += tl.load(grad_scores + place, mask=inside, other=0.0)
    result = tl.zeros([ROWS, P], dtype=s.dtype)
    if OF_WEIGHTS:
        g = tl.zeros([ROWS, P], dtype=s.dtype)
        is_chosen = (e < 0) & in_range[:, None]
        for j in range(K):
            here = e == tl.load(chosen + t * K + j, mask=in_range, other=E)[:, None]
            is_chosen = is_chosen | here
            g = tl.where(here, tl.load(grad_weights + t * K + j, mask=in_range, other=0.0)[:, None] * SCALE, g)
        x = tl.load(logits + place, mask=inside, other=0.0) if MODE == _AFTER else s
        raw = _unnormalised(x, s, is_chosen, MODE)
        if NORM:
            total = tl.sum(raw, 1)[:, None] + 1e-20
            g = tl.where(is_chosen, (g - tl.sum(g * raw, 1)[:, None] / total) / total, 0.0)
        if MODE == _AFTER:
            result += raw * (g - tl.sum(g * raw, 1)[:, None])
        else:
            grad += g
    if MODE == _SIGMOID:
        result += s * (1 - s) * grad
    elif OF_SCORES or MODE != _AFTER:
        result += s * (grad - tl.sum(s * grad, 1)[:, None])
    tl.store(out + place, result, mask=inside)


@kernel("titanmoe::route", mutates_args=("count_BE",))
def route(
    logits_TE: Tensor,
    bias_E: Tensor,
    index_T: Tensor,
    sample_T: Tensor,
    valid_T: Tensor,
    count_BE: Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
    scores_per_group: int,
    scoring: int,  # not `mode`: tracing fails for an op that mutates one argument and has another of that name
    norm: bool,
    scale: float,
    forced: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts from the router's logits, and add the counts of choices to count_BE in place. Not differentiable.

    Args:
        bias_E: expert_bias, added to the scores for the choice, not for the weights.
        index_T: the global position of each token, used if `forced`: its experts are then (position * K + k) mod E.
        sample_T: the sample of each token.
        valid_T: whether each token is no padding.
        count_BE: int64 counts of choices by sample and expert, to which those of valid tokens are added.
        groups: the number of groups of experts.
        top_groups: the number of groups from which a token chooses.
        scores_per_group: the number of a group's best scores whose sum rates it, 1 or 2.
        scoring: the score function, a value of SCORE_KERNELS: 0 softmax, 1 sigmoid, 2 softmax over the chosen experts.
        norm: whether weights are scaled to sum to 1 over a token's choices.
        scale: the factor of the weights, route_scale.
        forced: whether experts are chosen in turn instead of by score.

    Returns:
        Scores (T, E) and routing weights (T, K), padding's too, and chosen experts (T, K), E for padding; best first,
        unless `forced`.
    """
    inputs = [x.contiguous() for x in (logits_TE, bias_E, index_T, sample_T, valid_T)]
    T, E = logits_TE.shape
    scores_TE = torch.empty_like(inputs[0])
    weights_TK, chosen_TK = scores_TE.new_empty(T, top_k), index_T.new_empty(T, top_k, dtype=torch.int64)
    shape = expert_tile(E, TILE)
    if T:
        _route_forward[(cdiv(T, shape["ROWS"]),)](
            *inputs, scores_TE, weights_TK, chosen_TK, count_BE, T, **shape,
            SCALE=scale, K=top_k, KP=next_power_of_2(top_k), G=groups, GP=next_power_of_2(groups),
            TOP=top_groups, TWO=scores_per_group == 2 and groups < E, MODE=scoring, NORM=norm, FORCED=forced,
            num_warps=1,
        )  # fmt: skip
    return scores_TE, weights_TK, chosen_TK


@route.register_fake
def _(logits_TE, bias_E, index_T, sample_T, valid_T, count_BE, top_k, *_):
    scores_TE = logits_TE.new_empty(logits_TE.shape)
    chosen_TK = logits_TE.new_empty(logits_TE.shape[0], top_k, dtype=torch.int64)
    return scores_TE, logits_TE.new_empty(logits_TE.shape[0], top_k), chosen_TK


@kernel("titanmoe::route_backward")
def route_backward(
    grad_scores_TE: Tensor | None,
    grad_weights_TK: Tensor | None,
    logits_TE: Tensor,
    scores_TE: Tensor,
    chosen_TK: Tensor,
    mode: int,
    norm: bool,
    scale: float,
) -> Tensor:
    """Compute the gradient of the logits (T, E) from the gradients of scores and of routing weights.

    Args:
        grad_scores_TE: the gradient of the scores; None counts as zeros.
        grad_weights_TK: the gradient of the routing weights; None counts as zeros.
        chosen_TK: each token's chosen experts; E for padding, whose weights pass no gradient while its scores do.
        mode: the score function, a value of SCORE_KERNELS: 0 softmax, 1 sigmoid, 2 softmax over the chosen experts.
        norm: whether weights were scaled to sum to 1 over a token's choices.
        scale: the factor of the weights, route_scale.
    """
    logits_TE = logits_TE.contiguous()
    T, K = chosen_TK.shape
    out, shape = torch.empty_like(scores_TE), expert_tile(scores_TE.shape[1], TILE)
    if T:
        _route_backward[(cdiv(T, shape["ROWS"]),)](
            out if grad_scores_TE is None else grad_scores_TE.contiguous(),
            out if grad_weights_TK is None else grad_weights_TK.contiguous(),
            logits_TE, scores_TE, chosen_TK, out, T, **shape,
            SCALE=scale, K=K, MODE=mode, NORM=norm, OF_SCORES=grad_scores_TE is not None,
            OF_WEIGHTS=grad_weights_TK is not None, num_warps=1,
        )  # fmt: skip
    return out


@route_backward.register_fake
def _(grad_scores_TE, grad_weights_TK, logits_TE, scores_TE, *_):
    return scores_TE.new_empty(scores_TE.shape)


class RouteFunction(torch.autograd.Function):
    """The operation `route` with its backward: scores and routing weights are differentiable.

    Its inputs are those of `route`, with the number of samples B in place of count_BE; it also returns the counts
    (B, E), as its fourth output.
    """

    @staticmethod
    def forward(ctx, logits_TE, bias_E, index_T, sample_T, valid_T, samples, *options):
        count_BE = torch.zeros(samples, logits_TE.shape[1], dtype=torch.int64, device=logits_TE.device)
        tokens = (index_T, sample_T, valid_T)
        scores_TE, weights_TK, chosen_TK = route(logits_TE, bias_E, *tokens, count_BE, *options)
        ctx.save_for_backward(logits_TE, scores_TE, chosen_TK)
        *_, mode, norm, scale, _ = options
        ctx.constants = (mode, norm, scale)
        ctx.mark_non_differentiable(chosen_TK, count_BE)
        ctx.set_materialize_grads(False)
        return scores_TE, weights_TK, chosen_TK, count_BE

    @staticmethod
    def backward(ctx, grad_scores_TE, grad_weights_TK, *_):
        if grad_scores_TE is None and grad_weights_TK is None:
            return (None,) * 14
        grad = route_backward(grad_scores_TE, grad_weights_TK, *ctx.saved_tensors, *ctx.constants)
        return grad, *(None,) * 13
