"""Both ends of the model: embedding, head and the loss, with the vocabulary shared out over tp.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), T = B * S tokens, D model, V this
rank's vocabulary, v a slice of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.asked import askable, asked
from titanmoe.comm import ALONE, Group, all_gather, all_reduce, gather, local, scatter_sum
from titanmoe.models.layers import RMSNorm, promote
from titanmoe.tokens import IGNORE


def _own(ids: Tensor, size: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Row numbers within this rank's piece of the vocabulary (0 where foreign), and which ids are its own."""
    row = ids - tp.rank * size
    mine = (row >= 0) & (row < size)
    return row.where(mine, 0), mine


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, dim: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))
        self.tp = ALONE

    def forward(self, ids_BS: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.tp.size == 1:
            return F.embedding(ids_BS, weight)
        row_BS, mine_BS = _own(ids_BS, weight.shape[0], self.tp)
        return scatter_sum(F.embedding(row_BS, weight) * mine_BS.unsqueeze(-1), 1, self.tp)


class _CrossEntropySum(torch.autograd.Function):
    """Sum over tokens of logsumexp(logits) - logit[label]; the logits are only ever this rank's columns."""

    @staticmethod
    def forward(ctx, logits_TV, label_T, tp):
        counted_T = label_T != IGNORE
        row_T, mine_T = _own(label_T, logits_TV.shape[1], tp)
        top_T = all_reduce(logits_TV.amax(1), tp, "max")
        exp_TV = torch.exp(logits_TV - top_T.unsqueeze(1))
        label_logit_T = (logits_TV.gather(1, row_T.unsqueeze(1)).squeeze(1) - top_T) * (mine_T & counted_T)
        total_T, label_logit_T = all_reduce(torch.stack((exp_TV.sum(1), label_logit_T)), tp)
        ctx.save_for_backward(exp_TV.div_(total_T.unsqueeze(1)), row_T, mine_T & counted_T, counted_T)
        return ((total_T.log() - label_logit_T) * counted_T).sum()

    @staticmethod
    def backward(ctx, grad):
        softmax_TV, row_T, mine_T, counted_T = ctx.saved_tensors
        grad_TV = softmax_TV * counted_T.unsqueeze(1)
        grad_TV.scatter_add_(1, row_T.unsqueeze(1), -mine_T.unsqueeze(1).to(grad_TV.dtype))
        return grad_TV * grad, None, None


def cross_entropy_sum(logits_TV: Tensor, label_T: Tensor, tp: Group) -> Tensor:
    return _CrossEntropySum.apply(promote(logits_TV), label_T, tp)


CHUNK_BYTES = 32 * 2**20
"""Of logits at a time, as wide as the loss computes in, where the recipe leaves the number of chunks open."""


def chunk_count(tokens: int, vocabulary: int, width: int, asked_for: int) -> int:
    """How many slices of the vocabulary: as asked for, -1 for what keeps within CHUNK_BYTES, 0 for the whole."""
    count = -(-tokens * vocabulary * width // CHUNK_BYTES) if asked_for == -1 else asked_for
    return min(max(count, 1), vocabulary)


class _ChunkedCrossEntropySum(torch.autograd.Function):
    """cross_entropy_sum of x times the head's weight, of which at no time there are more logits than a slice's.

    The chunks are slices of the vocabulary for all tokens: so every row of the weight's gradient is one product,
    rounded once, and products stay large. The log-sum-exp runs along; backward makes each slice's logits again.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_VD, label_T, tp, chunks):
        counted_T = label_T != IGNORE
        row_T, mine_T = _own(label_T, weight_VD.shape[0], tp)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        top_T = x_TD.new_full(label_T.shape, -torch.inf, dtype=wide)
        total_T, label_logit_T = (x_TD.new_zeros(label_T.shape, dtype=wide) for _ in range(2))
        begin = 0
        for weight_vD in weight_VD.tensor_split(chunks):
            logits_Tv = promote(x_TD @ weight_vD.t())
            place_T = (row_T - begin).clamp(0, weight_vD.shape[0] - 1)
            within_T = place_T == row_T - begin
            label_logit_T += logits_Tv.gather(1, place_T.unsqueeze(1)).squeeze(1).where(within_T, 0)
            higher_T = torch.maximum(top_T, logits_Tv.amax(1))
            total_T *= torch.exp(top_T - higher_T)
            total_T += logits_Tv.sub_(higher_T.unsqueeze(1)).exp_().sum(1)
            top_T = higher_T
            begin += weight_vD.shape[0]
            del logits_Tv
        highest_T = all_reduce(top_T, tp, "max")
        label_logit_T = (label_logit_T - highest_T) * (mine_T & counted_T)
        total_T, label_logit_T = all_reduce(torch.stack((total_T * torch.exp(top_T - highest_T), label_logit_T)), tp)
        ctx.save_for_backward(x_TD, weight_VD, row_T.where(mine_T, -1), counted_T, highest_T + total_T.log())
        ctx.chunks = chunks
        return ((total_T.log() - label_logit_T) * counted_T).sum()

    @staticmethod
    def backward(ctx, grad):
        x_TD, weight_VD, row_T, counted_T, log_total_T = ctx.saved_tensors
        scale_T1 = (counted_T * grad).unsqueeze(1)
        grad_x_TD = torch.zeros_like(x_TD, dtype=grad.dtype) if asked(ctx, 0) else None
        grad_w_VD = torch.empty_like(weight_VD) if asked(ctx, 1) else None
        begin = 0
        for weight_vD in weight_VD.tensor_split(ctx.chunks):
            end = begin + weight_vD.shape[0]
            grad_Tv = promote(x_TD @ weight_vD.t()).sub_(log_total_T.unsqueeze(1)).exp_()
            place_T = (row_T - begin).clamp(0, end - begin - 1)
            grad_Tv.scatter_add_(1, place_T.unsqueeze(1), -(place_T == row_T - begin).unsqueeze(1).to(grad_Tv.dtype))
            grad_Tv = grad_Tv.mul_(scale_T1).to(x_TD.dtype)
            if grad_x_TD is not None:
                grad_x_TD += grad_Tv @ weight_vD
            if grad_w_VD is not None:
                torch.mm(grad_Tv.t(), x_TD, out=grad_w_VD[begin:end])
            begin = end
            del grad_Tv
        return None if grad_x_TD is None else grad_x_TD.to(x_TD.dtype), grad_w_VD, None, None, None


@torch.compiler.disable  # a graph of its own would hold every chunk's operations in a row
def chunked_cross_entropy_sum(x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, tp: Group, chunks: int) -> Tensor:
    return _ChunkedCrossEntropySum.apply(askable(x_TD), askable(weight_VD), label_T, tp, chunks)


class Head(nn.Module):
    """Final norm, projection to the vocabulary, loss. With labels: the sum of the cross-entropy; without: logits.

    further: hidden states with a final norm of their own, and their labels; their loss comes second.
    """

    def __init__(self, vocab_size: int, dim: int, eps: float, chunks: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.norm = RMSNorm(dim, eps, dtype)
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))
        self.chunks = chunks
        self.tp = ALONE

    def forward(
        self, x_BsD: Tensor, labels_BS: Tensor | None = None, further: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        normed_BsD = self.norm(x_BsD)
        if labels_BS is None:
            return all_gather(F.linear(gather(normed_BsD, 1, self.tp), local(self.weight)), 2, self.tp)
        loss = self.loss(normed_BsD, labels_BS)
        if further is None:
            return loss
        return loss, self.loss(*further)

    def loss(self, normed_BsD: Tensor, labels_BS: Tensor) -> Tensor:
        x_TD, weight_VD = gather(normed_BsD, 1, self.tp).flatten(0, 1), local(self.weight)
        width = torch.promote_types(x_TD.dtype, torch.float32).itemsize
        chunks = chunk_count(x_TD.shape[0], weight_VD.shape[0], width, self.chunks)
        if chunks > 1:
            return chunked_cross_entropy_sum(x_TD, weight_VD, labels_BS.flatten(), self.tp, chunks)
        return cross_entropy_sum(F.linear(x_TD, weight_VD), labels_BS.flatten(), self.tp)
