"""Compute a loss from slices of the logits, so that full logits are never in memory; the vocabulary is sharded.

`chunked_cross_entropy` does it in one call of the ranks of tp. If ranks of other pipeline stages have rows too, each
computes `Statistics`, and `merge_statistics` computes the loss from all of them. Called by the head's losses
(titanmoe.models.vocabulary, titanmoe.models.candidate_classes). `row_T` is the row of each label in this rank's
vocabulary, `begin` the row of a slice's first column, `log_total_T` the log-sum-exp of all logits of a token, `scale_T`
the gradient of the loss with respect to its cross-entropy.

Shapes: T tokens, D model, V this rank's vocabulary, v a slice of it, R ranks that shard the vocabulary, K statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.models.layers import promote
from titanmoe.ops.autograd_functions import as_non_leaf, wants_gradient
from titanmoe.ops.kernels import fused
from titanmoe.tokens import IGNORE


def vocabulary_rows(ids: Tensor, size: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Return the row of each id in this rank's shard of the vocabulary, and a bool that tells whether it is in there.

    The row is 0 for ids in other ranks' shards. Both have the shape of `ids`.

    Args:
        ids: token ids.
        size: number of ids in the shard.
        tp: the ranks that shard the vocabulary.
    """
    row = ids - tp.rank * size
    is_own = (row >= 0) & (row < size)
    return row.where(is_own, 0), is_own


def existing_rows(weight_VD: Tensor, label_T: Tensor, ids: int, size: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Return the head's weight without padding rows, and the labels renumbered for this shorter weight.

    `vocabulary_rows`, given the shorter weight's size, finds the row of a renumbered label if it is this rank's; labels
    of other ranks become a number past the rows of every rank, and IGNORE stays.

    Args:
        weight_VD: this rank's shard of the head's weight.
        label_T: ids of the labels, below `ids`, or IGNORE.
        ids: number of ids that exist; the vocabulary's rows after them are padding. Every rank has some that exist.
        size: number of rows of a rank; the last one may have fewer.
        tp: the ranks that shard the vocabulary.
    """
    existing = min(ids - tp.rank * size, size)
    row_T, is_own_T = vocabulary_rows(label_T, size, tp)
    elsewhere = tp.size * size  # past the rows of every rank
    own_T = (row_T + tp.rank * existing).where(is_own_T, elsewhere)
    return weight_VD[:existing], own_T.where(label_T != IGNORE, IGNORE)


def slices(weight_VD: Tensor, chunks: int) -> list[tuple[int, Tensor]]:
    """Split this rank's shard of the head's weight into views of consecutive rows, at most `chunks`, with their begins.

    The width of wide slices is a multiple of 128, since products on GPUs are slow if rows of logits are not aligned.
    """
    width = -(-weight_VD.shape[0] // chunks)
    width += -width % 128 if width >= 1024 else 0
    return [(i * width, weight_vD) for i, weight_vD in enumerate(weight_VD.split(width))]


def backward_by_slices(
    ctx: Any, x_TD: Tensor, weight_VD: Tensor, chunks: int, gradient: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states and of this rank's shard of the head's weight; None if not wanted.

    `ctx` is that of an autograd function whose first two inputs are these. `gradient` is called with the begin and the
    weight of one slice after the other, and returns the gradient of the slice's logits in x's dtype.
    """
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    grad_x_TD = torch.zeros_like(x_TD, dtype=wide) if wants_gradient(ctx, 0) else None
    grad_w_VD = torch.empty_like(weight_VD) if wants_gradient(ctx, 1) else None
    for begin, weight_vD in slices(weight_VD, chunks):
        grad_Tv = gradient(begin, weight_vD)
        if grad_x_TD is not None:
            grad_x_TD += grad_Tv @ weight_vD
        if grad_w_VD is not None:
            torch.mm(grad_Tv.t(), x_TD, out=grad_w_VD[begin : begin + len(weight_vD)])
        del grad_Tv  # before the next slice is computed
    return None if grad_x_TD is None else grad_x_TD.to(x_TD.dtype), grad_w_VD


def accumulate_slice(
    logits_Tv: Tensor,
    row_T: Tensor,
    begin: int,
    top_T: Tensor,
    total_T: Tensor,
    label_logit_T: Tensor,
    weighted_T: Tensor | None = None,
) -> None:
    """Add a slice of the logits to the running sums of each token, in place.

    Args:
        logits_Tv: the slice, which is overwritten if it is in float32 or wider.
        row_T: row of each label in this rank's vocabulary. A row outside the slice has no effect.
        begin: index of the slice's first column in this rank's vocabulary.
        top_T: largest logit so far; -inf before the first slice, when the sums are 0.
        total_T: sum of exp(logit - top_T) so far.
        label_logit_T: logit of the label, added if the label is in the slice.
        weighted_T: sum of exp(logit - top_T) * (logit - top_T) so far, for the entropy; None without.
    """
    logits_Tv = promote(logits_Tv)
    place_T = (row_T - begin).clamp(0, logits_Tv.shape[1] - 1)
    within_T = place_T == row_T - begin
    label_logit_T += logits_Tv.gather(1, place_T.unsqueeze(1)).squeeze(1).where(within_T, 0)
    higher_T = torch.maximum(top_T, logits_Tv.amax(1))
    if weighted_T is not None:
        weighted_T.copy_(shift_weighted_sum(weighted_T, total_T, top_T - higher_T))
    total_T *= torch.exp(top_T - higher_T)
    logits_Tv.sub_(higher_T.unsqueeze(1))
    if weighted_T is not None:
        weighted_T += (logits_Tv.exp() * logits_Tv).sum(1)
    total_T += logits_Tv.exp_().sum(1)
    top_T.copy_(higher_T)


def shift_weighted_sum(weighted_T: Tensor, total_T: Tensor, by_T: Tensor) -> Tensor:
    """Return the sum of exp(l) * l of each token after by_T has been added to each l.

    Args:
        weighted_T: sum of exp(l) * l before.
        total_T: sum of exp(l) before.
        by_T: number to add to each l of the token; -inf where nothing has been summed yet, which gives 0.
    """
    return (torch.exp(by_T) * (weighted_T + total_T * by_T)).where(total_T > 0, 0)


def merge_statistics(statistics_RKT: Tensor, has_label_T: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each token's log-sum-exp of all logits, its cross-entropy, and its entropy or None. Sends nothing.

    The last two are 0 without a label.

    Args:
        statistics_RKT: for each of R ranks the largest logit, the sum of exp(logit - that), the label's logit, which is
            0 on other ranks than the label's, and maybe the sum of exp(logit - largest) * (logit - largest).
        has_label_T: whether there is a label.
    """
    top_RT, total_RT, label_logit_RT, *weighted = statistics_RKT.unbind(1)
    top_T = top_RT.amax(0)
    by_RT, entropy_T = top_RT - top_T, None
    total_T = (total_RT * by_RT.exp()).sum(0)
    if weighted:
        weighted_T = shift_weighted_sum(weighted[0], total_RT, by_RT).sum(0)
        entropy_T = (total_T.log() - weighted_T / total_T) * has_label_T
    log_total_T = top_T + total_T.log()
    return log_total_T, (total_T.log() - (label_logit_RT.sum(0) - top_T)) * has_label_T, entropy_T


def slice_backward(logits_Tv: Tensor, row_T: Tensor, begin: int, log_total_T: Tensor, scale_T: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy for a slice of logits, in its dtype: scale * (softmax - one-hot label).

    The slice is overwritten if it is in float32 or wider. `row_T` is -1 for labels of other ranks.
    """
    grad_Tv = promote(logits_Tv).sub_(log_total_T.unsqueeze(1)).exp_()
    place_T = (row_T - begin).clamp(0, grad_Tv.shape[1] - 1)
    grad_Tv.scatter_add_(1, place_T.unsqueeze(1), -(place_T == row_T - begin).unsqueeze(1).to(grad_Tv.dtype))
    return grad_Tv.mul_(scale_T.unsqueeze(1)).to(logits_Tv.dtype)


def divide(logits: Tensor, temperature: float) -> Tensor:
    """Return logits divided by a temperature, in float32 at least; logits themselves if it is 1."""
    return logits if temperature == 1 else promote(logits) / temperature


def _entropy_backward(logits_Tv: Tensor, log_total_T: Tensor, entropy_T: Tensor, scale_T: Tensor) -> Tensor:
    """Return the gradient of a slice of logits through the tokens' entropies: -p (log p + entropy) * scale.

    `scale_T` is the gradient of the loss with respect to each entropy here.
    """
    log_p_Tv = promote(logits_Tv) - log_total_T.unsqueeze(1)
    return (log_p_Tv.exp() * (log_p_Tv + entropy_T.unsqueeze(1))).mul_(-scale_T.unsqueeze(1)).to(logits_Tv.dtype)


@dataclass(frozen=True)
class LossOptions:
    """Options of a loss that is computed from slices of the logits."""

    chunks: int
    kernels: str
    with_entropy: bool
    temperature: float

    def use_kernels(self, x_TD: Tensor) -> bool:
        """Return whether Triton kernels are used for hidden states x. There are none for entropy or temperature."""
        return not self.with_entropy and self.temperature == 1 and fused(self.kernels, x_TD)


def _sum_slices(
    x_TD: Tensor, weight_VD: Tensor, row_T: Tensor, options: LossOptions, logits: list[Tensor] | None = None
) -> list[Tensor]:
    """Return a list of numbers of each token (T,) from this rank's logits / temperature. Nothing is sent.

    They are the largest logit, the sum of exp(logit - largest), the label's logit (0 if it is in another shard) and,
    for the entropy, the sum of exp(logit - largest) * (logit - largest).

    Args:
        x_TD: normed hidden states.
        weight_VD: this rank's shard of the head's weight.
        row_T: row of each label in the shard. A row outside has no effect.
        logits: list to which the logits of each slice are appended, if given.
    """
    take = accumulate_slice
    if options.use_kernels(x_TD):
        from titanmoe.ops.kernels.loss import loss_slice as take
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    top_T = x_TD.new_full(row_T.shape, -torch.inf, dtype=wide)
    sums = [x_TD.new_zeros(row_T.shape, dtype=wide) for _ in range(3 if options.with_entropy else 2)]
    for begin, weight_vD in slices(weight_VD, options.chunks):
        logits_Tv = divide(x_TD @ weight_vD.t(), options.temperature)
        if logits is not None:
            logits.append(logits_Tv.clone() if take is accumulate_slice else logits_Tv)
        take(logits_Tv, row_T, begin, top_T, *sums)
        del logits_Tv  # before the next slice is computed
    return [top_T, *sums]


def _slices_backward(
    ctx: Any,
    x_TD: Tensor,
    weight_VD: Tensor,
    row_T: Tensor,
    options: LossOptions,
    log_total_T: Tensor,
    scale_T: Tensor,
    entropy_T: Tensor | None = None,
    entropy_scale_T: Tensor | None = None,
    logits: Sequence[Tensor] = (),
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight, for the cross-entropy and maybe the entropy (`backward_by_slices`).

    Each is None if ctx does not want it. Logits are over `options.temperature`. Sends nothing: where ranks shard the
    vocabulary, x's gradient is a partial sum.

    Args:
        row_T: row of each label in the shard; -1 if the label is not there.
        entropy_T: entropy of each token's distribution; None without.
        entropy_scale_T: gradient of the loss with respect to each entropy; None without.
        logits: those of all slices, which are overwritten; () to recompute them.
    """
    use_kernel, saved = options.use_kernels(x_TD), iter(logits)
    if use_kernel:
        from titanmoe.ops.kernels.loss import loss_slice_backward

    def gradient(begin: int, weight_vD: Tensor) -> Tensor:
        grad_Tv = next(saved) if logits else divide(x_TD @ weight_vD.t(), options.temperature)
        if use_kernel:
            loss_slice_backward(grad_Tv, row_T, begin, log_total_T, scale_T)
        elif entropy_T is None:
            grad_Tv = slice_backward(grad_Tv, row_T, begin, log_total_T, scale_T)
        else:
            entropy_grad_Tv = _entropy_backward(grad_Tv, log_total_T, entropy_T, entropy_scale_T)
            grad_Tv = slice_backward(grad_Tv, row_T, begin, log_total_T, scale_T) + entropy_grad_Tv
        return divide(grad_Tv, options.temperature).to(x_TD.dtype)

    return backward_by_slices(ctx, x_TD, weight_VD, options.chunks, gradient)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of x times the head's weight, with at most one slice of the logits in memory.

    With the entropy or a temperature, which have no kernel, there are at most two slices. The chunks are slices of the
    vocabulary for all tokens: so every row of the weight's gradient is one product, rounded once, and products stay
    large. Forward has a running log-sum-exp; backward recomputes the logits.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_VD, label_T, tp, options):
        has_label_T = label_T != IGNORE
        row_T, is_own_T = vocabulary_rows(label_T, weight_VD.shape[0], tp)
        top_T, total_T, label_logit_T, *weighted = _sum_slices(x_TD, weight_VD, row_T, options)
        highest_T, entropy_T = all_reduce(top_T, tp, "max"), None
        label_logit_T = (label_logit_T - highest_T) * (is_own_T & has_label_T)
        weighted = [shift_weighted_sum(weighted_T, total_T, top_T - highest_T) for weighted_T in weighted]
        sums = (total_T * torch.exp(top_T - highest_T), label_logit_T, *weighted)
        total_T, label_logit_T, *weighted = all_reduce(torch.stack(sums), tp)
        if options.with_entropy:
            entropy_T = (total_T.log() - weighted[0] / total_T) * has_label_T
        log_total_T = highest_T + total_T.log()
        ctx.save_for_backward(x_TD, weight_VD, row_T.where(is_own_T, -1), has_label_T, log_total_T, entropy_T)
        ctx.options = options
        return (total_T.log() - label_logit_T) * has_label_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, grad_entropy_T):
        x_TD, weight_VD, row_T, has_label_T, log_total_T, entropy_T = ctx.saved_tensors
        entropy = () if entropy_T is None else (entropy_T, has_label_T * grad_entropy_T)
        inputs = x_TD, weight_VD, row_T, ctx.options, log_total_T, has_label_T * grad_T
        return *_slices_backward(ctx, *inputs, *entropy), None, None, None


class Statistics(torch.autograd.Function):
    """Statistics (K, T) of this rank's logits, from which `merge_statistics` computes the losses.

    Its inputs are hidden states, this rank's shard of the head's weight, the row of each label in the shard (-1 if it
    is in another) and LossOptions.

    The gradient that backward gets is not that of the statistics. Its rows are the log-sum-exp of all logits and the
    gradient of the cross-entropy of each token, and then, if it is computed, the entropy and its gradient.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_VD, row_T, options):
        # Logits of one slice are saved, as without slices.
        ctx.logits = [] if options.chunks == 1 and any(ctx.needs_input_grad) else None
        statistics_KT = torch.stack(_sum_slices(x_TD, weight_VD, row_T, options, ctx.logits))
        ctx.save_for_backward(x_TD, weight_VD, row_T)
        ctx.options = options
        return statistics_KT

    @staticmethod
    def backward(ctx, numbers_KT):
        logits, ctx.logits = ctx.logits or (), None
        numbers = numbers_KT if ctx.options.with_entropy else numbers_KT[:2]
        return *_slices_backward(ctx, *ctx.saved_tensors, ctx.options, *numbers, logits=logits), None, None


@torch.compiler.disable  # its graph would repeat the operations for every chunk
def chunked_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    tp: Group,
    chunks: int,
    *,
    kernels: str = "auto",
    with_entropy: bool = False,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Return each token's cross-entropy (T,), and the entropy (T,) of its distribution or None. Collective over tp.

    Both are differentiable, in float32 at least, and 0 without a label.

    Args:
        x_TD: normed hidden states, the same on all ranks of tp. Each rank gets its summand of their gradient.
        weight_VD: this rank's shard of the head's weight.
        label_T: ids of the labels, IGNORE where there is none.
        tp: the ranks that shard the vocabulary.
        chunks: largest number of slices that this rank's vocabulary is split into.
        kernels: moe.kernels; there are none for the entropy or a temperature.
        temperature: divides the logits.
    """
    options = LossOptions(chunks, kernels, with_entropy, temperature)
    return _ChunkedCrossEntropy.apply(as_non_leaf(x_TD), as_non_leaf(weight_VD), label_T, tp, options)
