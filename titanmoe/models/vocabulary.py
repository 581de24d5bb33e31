"""Both ends of the model: embedding, head and the loss, with the vocabulary split over tp.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), T = B * S tokens, D model, V this
rank's vocabulary, v a slice of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, Group, all_gather, all_reduce, gather, local, scatter_sum
from titanmoe.models.layers import RMSNorm, promote
from titanmoe.ops import device
from titanmoe.ops.kernels import fused
from titanmoe.ops.split_backward import gradient_wanted, with_own_node
from titanmoe.tokens import IGNORE


def _own_rows(ids: Tensor, size: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Row numbers within this rank's piece of the vocabulary (0 for ids of other ranks), and which ids are its own."""
    row = ids - tp.rank * size
    is_own = (row >= 0) & (row < size)
    return row.where(is_own, 0), is_own


class Embedding(nn.Module):
    tp_dims = {"weight": 0}

    def __init__(self, vocab_size: int, dim: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))
        self.tp = NO_GROUP

    def forward(self, ids_BS: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.tp.size == 1:
            return F.embedding(ids_BS, weight)
        row_BS, is_own_BS = _own_rows(ids_BS, weight.shape[0], self.tp)
        return scatter_sum(F.embedding(row_BS, weight) * is_own_BS.unsqueeze(-1), 1, self.tp)


class _CrossEntropy(torch.autograd.Function):
    """logsumexp(logits) - logit[label] of each token, 0 if it has no label. The logits are only ever this rank's
    columns."""

    @staticmethod
    def forward(ctx, logits_TV, label_T, tp):
        has_label_T = label_T != IGNORE
        row_T, is_own_T = _own_rows(label_T, logits_TV.shape[1], tp)
        top_T = all_reduce(logits_TV.amax(1), tp, "max")
        exp_TV = torch.exp(logits_TV - top_T.unsqueeze(1))
        label_logit_T = (logits_TV.gather(1, row_T.unsqueeze(1)).squeeze(1) - top_T) * (is_own_T & has_label_T)
        total_T, label_logit_T = all_reduce(torch.stack((exp_TV.sum(1), label_logit_T)), tp)
        ctx.save_for_backward(exp_TV.div_(total_T.unsqueeze(1)), row_T, is_own_T & has_label_T, has_label_T)
        return (total_T.log() - label_logit_T) * has_label_T

    @staticmethod
    def backward(ctx, grad_T):
        softmax_TV, row_T, is_own_T, has_label_T = ctx.saved_tensors
        grad_TV = softmax_TV * has_label_T.unsqueeze(1)
        grad_TV.scatter_add_(1, row_T.unsqueeze(1), -is_own_T.unsqueeze(1).to(grad_TV.dtype))
        return grad_TV * grad_T.unsqueeze(1), None, None


def cross_entropy(logits_TV: Tensor, label_T: Tensor, tp: Group) -> Tensor:
    return _CrossEntropy.apply(promote(logits_TV), label_T, tp)


CHUNK_BYTES, CHUNK_BYTES_GPU = 32 * 2**20, 2**30
"""Of logits at a time, in the dtype that the loss computes in, if the recipe leaves the number of chunks open. A CPU
keeps them in its caches. On a GPU every slice adds to the gradient of all hidden states in memory, so slices are wide.
"""


def chunk_count(tokens: int, vocabulary: int, width: int, setting: int, most: int = CHUNK_BYTES) -> int:
    """How many slices of the vocabulary: as configured, -1 for as many as stay within `most` bytes, 0 for the whole."""
    count = -(-tokens * vocabulary * width // most) if setting == -1 else setting
    return min(max(count, 1), vocabulary)


def _slices(weight_VD: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """At most that many. The width of wide ones is a multiple of 128, since products on GPUs are slow if rows of logits
    are not aligned."""
    width = -(-weight_VD.shape[0] // chunks)
    return weight_VD.split(width if width < 1024 else width + -width % 128)


def _slice(logits_Tv: Tensor, row_T: Tensor, begin: int, top_T: Tensor, total_T: Tensor, label_logit_T: Tensor) -> None:
    """Adds a slice, whose first column is number `begin`, to each token's largest logit, the sum of exp(logit -
    largest), and the logit of its label. The logits are overwritten.
    """
    logits_Tv = promote(logits_Tv)
    place_T = (row_T - begin).clamp(0, logits_Tv.shape[1] - 1)
    within_T = place_T == row_T - begin
    label_logit_T += logits_Tv.gather(1, place_T.unsqueeze(1)).squeeze(1).where(within_T, 0)
    higher_T = torch.maximum(top_T, logits_Tv.amax(1))
    total_T *= torch.exp(top_T - higher_T)
    total_T += logits_Tv.sub_(higher_T.unsqueeze(1)).exp_().sum(1)
    top_T.copy_(higher_T)


def _slice_backward(logits_Tv: Tensor, row_T: Tensor, begin: int, log_total_T: Tensor, scale_T: Tensor) -> Tensor:
    """The gradients of a slice's logits, which are overwritten."""
    grad_Tv = promote(logits_Tv).sub_(log_total_T.unsqueeze(1)).exp_()
    place_T = (row_T - begin).clamp(0, grad_Tv.shape[1] - 1)
    grad_Tv.scatter_add_(1, place_T.unsqueeze(1), -(place_T == row_T - begin).unsqueeze(1).to(grad_Tv.dtype))
    return grad_Tv.mul_(scale_T.unsqueeze(1)).to(logits_Tv.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """cross_entropy of x times the head's weight, with never more logits in memory than one slice's.

    The chunks are slices of the vocabulary for all tokens: so every row of the weight's gradient is one product,
    rounded once, and products stay large. Forward keeps a running log-sum-exp; backward computes the logits again.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_VD, label_T, tp, chunks, kernels):
        take = _slice
        if fused(kernels, x_TD):
            from titanmoe.ops.kernels.loss import loss_slice as take
        has_label_T = label_T != IGNORE
        row_T, is_own_T = _own_rows(label_T, weight_VD.shape[0], tp)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        top_T = x_TD.new_full(label_T.shape, -torch.inf, dtype=wide)
        total_T, label_logit_T = (x_TD.new_zeros(label_T.shape, dtype=wide) for _ in range(2))
        begin = 0
        for weight_vD in _slices(weight_VD, chunks):
            take(x_TD @ weight_vD.t(), row_T, begin, top_T, total_T, label_logit_T)
            begin += weight_vD.shape[0]
        highest_T = all_reduce(top_T, tp, "max")
        label_logit_T = (label_logit_T - highest_T) * (is_own_T & has_label_T)
        total_T, label_logit_T = all_reduce(torch.stack((total_T * torch.exp(top_T - highest_T), label_logit_T)), tp)
        ctx.save_for_backward(x_TD, weight_VD, row_T.where(is_own_T, -1), has_label_T, highest_T + total_T.log())
        ctx.chunks, ctx.kernels = chunks, kernels
        return (total_T.log() - label_logit_T) * has_label_T

    @staticmethod
    def backward(ctx, grad_T):
        x_TD, weight_VD, row_T, has_label_T, log_total_T = ctx.saved_tensors
        scale_T, use_kernel = has_label_T * grad_T, fused(ctx.kernels, x_TD)
        if use_kernel:
            from titanmoe.ops.kernels.loss import loss_slice_backward
        grad_x_TD = torch.zeros_like(x_TD, dtype=grad_T.dtype) if gradient_wanted(ctx, 0) else None
        grad_w_VD = torch.empty_like(weight_VD) if gradient_wanted(ctx, 1) else None
        begin = 0
        for weight_vD in _slices(weight_VD, ctx.chunks):
            end = begin + weight_vD.shape[0]
            grad_Tv = x_TD @ weight_vD.t()
            if use_kernel:
                loss_slice_backward(grad_Tv, row_T, begin, log_total_T, scale_T)
            else:
                grad_Tv = _slice_backward(grad_Tv, row_T, begin, log_total_T, scale_T)
            if grad_x_TD is not None:
                grad_x_TD += grad_Tv @ weight_vD
            if grad_w_VD is not None:
                torch.mm(grad_Tv.t(), x_TD, out=grad_w_VD[begin:end])
            begin = end
            del grad_Tv
        return None if grad_x_TD is None else grad_x_TD.to(x_TD.dtype), grad_w_VD, None, None, None, None


@torch.compiler.disable  # its graph would repeat the operations for every chunk
def chunked_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, label_T: Tensor, tp: Group, chunks: int, kernels: str = "auto"
) -> Tensor:
    return _ChunkedCrossEntropy.apply(with_own_node(x_TD), with_own_node(weight_VD), label_T, tp, chunks, kernels)


class Head(nn.Module):
    """Final norm, projection to the vocabulary, loss. With labels: the cross-entropy of each, 0 where there is none;
    without: logits.

    mtp: hidden states of multi-token prediction, with a final norm of their own, and their labels; their losses come
    second.
    """

    tp_dims = {"weight": 0}

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        eps: float,
        chunks: int,
        dtype: torch.dtype | None = None,
        kernels: str = "auto",
    ):
        super().__init__()
        self.norm = RMSNorm(dim, eps, dtype)
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))
        self.chunks, self.kernels = chunks, kernels
        self.tp = NO_GROUP

    def forward(
        self, x_BsD: Tensor, labels_BS: Tensor | None = None, mtp: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        normed_BsD = self.norm(x_BsD)
        if labels_BS is None:
            return all_gather(F.linear(gather(normed_BsD, 1, self.tp), local(self.weight)), 2, self.tp)
        loss_BS = self.loss(normed_BsD, labels_BS)
        if mtp is None:
            return loss_BS
        return loss_BS, self.loss(*mtp)

    def loss(self, normed_BsD: Tensor, labels_BS: Tensor) -> Tensor:
        x_TD, weight_VD = gather(normed_BsD, 1, self.tp).flatten(0, 1), local(self.weight)
        width = torch.promote_types(x_TD.dtype, torch.float32).itemsize
        most = device.way(x_TD, CHUNK_BYTES_GPU, cpu=CHUNK_BYTES, compiled=True)
        chunks = chunk_count(x_TD.shape[0], weight_VD.shape[0], width, self.chunks, most)
        label_T = labels_BS.flatten()
        if chunks > 1:
            loss_T = chunked_cross_entropy(x_TD, weight_VD, label_T, self.tp, chunks, self.kernels)
        else:
            loss_T = cross_entropy(F.linear(x_TD, weight_VD), label_T, self.tp)
        return loss_T.view_as(labels_BS).clone()  # on a view, FSDP would lose its hooks
