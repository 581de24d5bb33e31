"""Compute a loss from slices of the logits, so that full logits are never in memory; the vocabulary is sharded over tp.

Used by the head's losses (titanmoe.models.vocabulary, titanmoe.models.candidate_classes).

Shapes: T tokens, D model, V this rank's vocabulary, v a slice of it, R ranks that shard the vocabulary, K statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group
from titanmoe.models.layers import promote
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


def slices(weight_VD: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Split this rank's shard of the head's weight into views of consecutive rows, at most `chunks` of them.

    The width of wide slices is a multiple of 128, since products on GPUs are slow if rows of logits are not aligned.
    """
    width = -(-weight_VD.shape[0] // chunks)
    return weight_VD.split(width if width < 1024 else width + -width % 128)


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
        top_T: largest logit so far.
        total_T: sum of exp(logit - top_T) so far.
        label_logit_T: logit of the label, added if the label is in the slice.
        weighted_T: sum of exp(logit - top_T) * (logit - top_T) so far, for the entropy.
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
    """Return each token's log-sum-exp of all logits, its cross-entropy, and its entropy or None.

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
    """Return the gradient of the cross-entropy for a slice of logits: scale * (softmax - one-hot label).

    Args:
        logits_Tv: the slice, which is overwritten if it is in float32 or wider.
        row_T: row of each label in this rank's vocabulary; -1 if the label is not there.
        begin: index of the slice's first column in this rank's vocabulary.
        log_total_T: log-sum-exp of all logits of a token.
        scale_T: gradient of the loss with respect to each token's cross-entropy.
    """
    grad_Tv = promote(logits_Tv).sub_(log_total_T.unsqueeze(1)).exp_()
    place_T = (row_T - begin).clamp(0, grad_Tv.shape[1] - 1)
    grad_Tv.scatter_add_(1, place_T.unsqueeze(1), -(place_T == row_T - begin).unsqueeze(1).to(grad_Tv.dtype))
    return grad_Tv.mul_(scale_T.unsqueeze(1)).to(logits_Tv.dtype)
