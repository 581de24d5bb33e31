"""Log-probabilities of candidate ids: for distillation, from slices of the logits, with the vocabulary sharded over tp.

The classes of a token are its K candidate ids, and all other ids together: the rest. The rest is a log-sum-exp over the
logits of ids that are no candidates, never one minus the others, so it is exact where it is tiny, and zero where every
id is a candidate. Full logits are never in memory. `weight_VD` is this rank's shard of the head's weight, `tp` are the
ranks that shard it, `chunks` is the largest number of slices that a shard is split into.

Shapes: T tokens, D model, V this rank's vocabulary, v a slice of it, K candidate ids of each token, n values of a
token, C = K + 1 classes, the rest last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group, all_gather, all_reduce
from titanmoe.models.layers import promote
from titanmoe.models.logit_slices import accumulate_slice, backward_by_slices, slice_backward, slices, vocabulary_rows
from titanmoe.ops.autograd_functions import as_non_leaf
from titanmoe.tokens import IGNORE


def _candidate_columns(row_TK: Tensor, begin: int, logits_Tv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column of each candidate in a slice of logits, (T, K), and whether the candidate is in the slice.

    The column of a candidate outside the slice is the slice's first or last.

    Args:
        row_TK: row of each candidate in this rank's vocabulary; -1 if it is not there.
        begin: index of the slice's first column in this rank's vocabulary.
    """
    place_TK = (row_TK - begin).clamp(0, logits_Tv.shape[1] - 1)
    return place_TK, place_TK == row_TK - begin


def _without_candidates(logits_Tv: Tensor, place_TK: Tensor, within_TK: Tensor, temperature: float) -> Tensor:
    """Return a copy of a slice of logits divided by the temperature, with -inf in place of the candidates' logits.

    `place_TK` and `within_TK` are what `_candidate_columns` returns for the slice.
    """
    removed_TK = torch.zeros_like(place_TK, dtype=logits_Tv.dtype).masked_fill_(within_TK, -torch.inf)
    return (logits_Tv / temperature).scatter_add_(1, place_TK, removed_TK)


class _CandidateLogProbs(torch.autograd.Function):
    """The cross-entropy of each label, without a temperature, and the log-probability of each class; 0 without a label.

    With a = logits / temperature, L their log-sum-exp and l that of the rest: d log p_k / d a_v = (v is k) - p_v, and
    d log rest / d a_v = (v is in the rest) exp(a_v - l) - p_v.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_VD, label_T, candidates_TK, tp, chunks, temperature):
        wide, has_label_T = torch.promote_types(x_TD.dtype, torch.float32), label_T != IGNORE
        row_T, is_own_T = vocabulary_rows(label_T, weight_VD.shape[0], tp)
        row_TK, is_own_TK = vocabulary_rows(candidates_TK, weight_VD.shape[0], tp)
        row_TK = row_TK.where(is_own_TK, -1)
        # Not -inf: a slice may have nothing of the rest, and -inf less -inf is not 0.
        top_2T = x_TD.new_full((2, *label_T.shape), torch.finfo(wide).min, dtype=wide)
        total_2T, label_logit_2T = torch.zeros_like(top_2T), torch.zeros_like(top_2T)
        logit_TK = x_TD.new_zeros(candidates_TK.shape, dtype=wide)
        for begin, weight_vD in slices(weight_VD, chunks):
            logits_Tv = promote(x_TD @ weight_vD.t())
            place_TK, within_TK = _candidate_columns(row_TK, begin, logits_Tv)
            logit_TK += logits_Tv.gather(1, place_TK).where(within_TK, 0)
            both = logits_Tv, _without_candidates(logits_Tv, place_TK, within_TK, temperature)
            for logits, top_T, total_T, label_logit_T in zip(both, top_2T, total_2T, label_logit_2T, strict=True):
                accumulate_slice(logits, row_T, begin, top_T, total_T, label_logit_T)
        highest_2T = all_reduce(top_2T, tp, "max")
        label_logit_T = (label_logit_2T[0] - highest_2T[0]) * (is_own_T & has_label_T)
        sums = torch.cat((total_2T * torch.exp(top_2T - highest_2T), label_logit_T.unsqueeze(0), logit_TK.t()))
        total_T, rest_T, label_logit_T, *logits = all_reduce(sums, tp)
        log_rest_T, a_KT = highest_2T[1] + rest_T.log(), torch.stack(logits) / temperature
        a_CT = torch.cat((a_KT, log_rest_T.unsqueeze(0)))
        log_p_CT = a_CT - a_CT.logsumexp(0)
        ctx.save_for_backward(
            *(x_TD, weight_VD, row_T.where(is_own_T, -1), row_TK, has_label_T),
            *(highest_2T[0] + total_T.log(), log_rest_T, log_p_CT),
        )
        ctx.chunks, ctx.temperature = chunks, temperature
        return (total_T.log() - label_logit_T) * has_label_T, log_p_CT.where(has_label_T, 0)

    @staticmethod
    def backward(ctx, grad_T, grad_CT):
        x_TD, weight_VD, row_T, row_TK, has_label_T, log_total_T, log_rest_T, log_p_CT = ctx.saved_tensors
        scale_T, grad_CT = has_label_T * grad_T, has_label_T * grad_CT
        grad_CT = grad_CT - log_p_CT.exp() * grad_CT.sum(0)
        grad_TK, grad_rest_T, some_rest_T = grad_CT[:-1].t(), grad_CT[-1], log_rest_T > -torch.inf
        log_rest_T = log_rest_T.where(some_rest_T, 0)

        def gradient(begin: int, weight_vD: Tensor) -> Tensor:
            logits_Tv = promote(x_TD @ weight_vD.t())
            place_TK, within_TK = _candidate_columns(row_TK, begin, logits_Tv)
            grad_Tv = _without_candidates(logits_Tv, place_TK, within_TK, ctx.temperature)
            grad_Tv.sub_(log_rest_T.unsqueeze(1)).exp_().mul_(grad_rest_T.unsqueeze(1))
            grad_Tv.scatter_add_(1, place_TK, grad_TK.where(within_TK, 0)).div_(ctx.temperature)
            grad_Tv += slice_backward(logits_Tv, row_T, begin, log_total_T, scale_T)
            return grad_Tv.to(x_TD.dtype)

        return *backward_by_slices(ctx, x_TD, weight_VD, ctx.chunks, gradient), None, None, None, None, None


@torch.compiler.disable  # its graph would repeat the operations for every chunk
def candidate_log_probs(
    x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, candidates_TK: Tensor, tp: Group, chunks: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return each label's cross-entropy (T,) and the log-probabilities of the candidate ids (C, T). Collective over tp.

    Row C - 1 = K is the log-probability of all ids that are no candidates together. Both results are in float32 at
    least, differentiable, and 0 where there is no label.

    Args:
        x_TD: normed hidden states, the same on all ranks of tp. Each rank gets its summand of their gradient.
        label_T: ids of the labels, IGNORE where there is none.
        candidates_TK: candidate ids of each token, all different.
        temperature: divides the logits for the log-probabilities, not for the cross-entropy.
    """
    x_TD, weight_VD = as_non_leaf(x_TD), as_non_leaf(weight_VD)
    return _CandidateLogProbs.apply(x_TD, weight_VD, label_T, candidates_TK, tp, chunks, temperature)


def _keep_largest(a_Tn: Tensor, rest_T: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's largest values and their columns, both (T, count), and the log-sum-exp of its other values.

    The largest value is first. `a_Tn`, the values, are overwritten. The log-sum-exp includes `rest_T`, that of values
    which were left out before.
    """
    top_TK, place_TK = a_Tn.topk(count, 1)
    return top_TK, place_TK, torch.logaddexp(rest_T, a_Tn.scatter_(1, place_TK, -torch.inf).logsumexp(1))


@torch.compiler.disable
@torch.no_grad()
def top_k_log_probs(
    x_TD: Tensor, weight_VD: Tensor, count: int, tp: Group, chunks: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the ids of each token's top-k logits, (T, K), the largest first, and their log-probabilities, (C, T).

    Row C - 1 = K is the log-probability of all other ids together. Not differentiable. Collective over tp.

    Args:
        x_TD: normed hidden states, the same on all ranks of tp.
        count: number K of ids for each token.
        temperature: divides the logits.
    """
    wide, tokens = torch.promote_types(x_TD.dtype, torch.float32), x_TD.shape[0]
    top_TK = x_TD.new_full((tokens, count), -torch.inf, dtype=wide)
    rest_T, ids_TK = x_TD.new_full((tokens,), -torch.inf, dtype=wide), torch.zeros_like(top_TK, dtype=torch.int64)
    first = tp.rank * weight_VD.shape[0] - count  # id of the shard's first row, less the columns before a slice's
    for begin, weight_vD in slices(weight_VD, chunks):
        a_Tv = promote(x_TD @ weight_vD.t()) / temperature
        top_TK, place_TK, rest_T = _keep_largest(torch.cat((top_TK, a_Tv), 1), rest_T, count)
        earlier_TK = ids_TK.gather(1, place_TK.clamp(max=count - 1))
        ids_TK = earlier_TK.where(place_TK < count, place_TK + (first + begin))
    if tp.size > 1:
        rest_T = all_gather(rest_T.unsqueeze(1), 1, tp).logsumexp(1)
        top_TK, place_TK, rest_T = _keep_largest(all_gather(top_TK, 1, tp), rest_T, count)
        ids_TK = all_gather(ids_TK, 1, tp).gather(1, place_TK)
    a_CT = torch.cat((top_TK.t(), rest_T.unsqueeze(0)))
    return ids_TK, a_CT - a_CT.logsumexp(0)
