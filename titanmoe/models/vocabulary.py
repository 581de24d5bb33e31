"""Both ends of the model: embedding, head and the loss, with the vocabulary shared out over tp.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), D model, V this rank's vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Head(nn.Module):
    """Final norm, projection to the vocabulary, loss. With labels: the sum of the cross-entropy; without: logits.

    further: hidden states with a final norm of their own, and their labels; their loss comes second.
    """

    def __init__(self, vocab_size: int, dim: int, eps: float, dtype: torch.dtype | None = None):
        super().__init__()
        self.norm = RMSNorm(dim, eps, dtype)
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))
        self.tp = ALONE

    def forward(
        self, x_BsD: Tensor, labels_BS: Tensor | None = None, further: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        logits_BSV = self.logits(self.norm(x_BsD))
        if labels_BS is None:
            return all_gather(logits_BSV, 2, self.tp)
        loss = cross_entropy_sum(logits_BSV.flatten(0, 1), labels_BS.flatten(), self.tp)
        if further is None:
            return loss
        y_BsD, later_BS = further
        return loss, cross_entropy_sum(self.logits(y_BsD).flatten(0, 1), later_BS.flatten(), self.tp)

    def logits(self, normed_BsD: Tensor) -> Tensor:
        return F.linear(gather(normed_BsD, 1, self.tp), local(self.weight))
