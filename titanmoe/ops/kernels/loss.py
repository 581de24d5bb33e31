"""Kernels for the loss over slices of the logits, which are read once in forward, and read and overwritten in backward.

Reference: `titanmoe.models.logit_slices`. With m the largest logit so far, s the sum of exp(l - m):

    forward     m' = max(m, max l)      s' = s exp(m - m') + sum exp(l - m')
    backward    (exp(l - log-sum-exp) - 1 at the label) * scale, overwriting l

A program has one token, so no sum depends on the order of execution.

Shapes: T tokens, v a slice of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import kernel, next_power_of_2, sum_dtype

TILE = 4096


@triton.jit(do_not_specialize=["begin"])
def _loss_forward(logits, label, top, total, label_logit, begin, V: tl.constexpr, WIDE: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * V
    m, s = tl.load(top + t), tl.load(total + t)
    for first in range(0, V, COLUMNS):
        v = first + tl.arange(0, COLUMNS)
        x = tl.load(row + v, mask=v < V, other=float("-inf")).to(WIDE)
        higher = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp(m - higher) + tl.sum(tl.exp(x - higher), 0)
        m = higher
    tl.store(top + t, m)
    tl.store(total + t, s)
    place = tl.load(label + t) - begin
    here = (place >= 0) & (place < V)
    tl.store(label_logit + t, tl.load(row + place, mask=here, other=0.0).to(WIDE), mask=here)


@triton.jit(do_not_specialize=["begin"])
def _loss_backward(logits, label, log_total, scale, begin, V: tl.constexpr, WIDE: tl.constexpr,
                   COLUMNS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * V
    place, lse, factor = tl.load(label + t) - begin, tl.load(log_total + t), tl.load(scale + t)
    for first in range(0, V, COLUMNS):
        v = first + tl.arange(0, COLUMNS)
        x = tl.load(row + v, mask=v < V, other=0.0).to(WIDE)
        grad = (tl.exp(x - lse) - tl.where(v == place, 1.0, 0.0)) * factor
        tl.store(row + v, grad.to(logits.dtype.element_ty), mask=v < V)


def _launch(kernel, logits_Tv: Tensor, *rest) -> None:
    T, V = logits_Tv.shape
    if T:
        columns = min(next_power_of_2(V), TILE)
        kernel[(T,)](logits_Tv, *rest, V=V, WIDE=sum_dtype(logits_Tv.dtype), COLUMNS=columns, num_warps=8)


@kernel("titanmoe::loss_slice", mutates_args=("top_T", "total_T", "label_logit_T"))
def loss_slice(
    logits_Tv: Tensor, label_T: Tensor, begin: int, top_T: Tensor, total_T: Tensor, label_logit_T: Tensor
) -> None:
    """Update each token's running numbers of a softmax over the vocabulary with a slice of its logits, in place.

    Args:
        label_T: the column of each token's label in this rank's vocabulary; one outside the slice has no effect.
        begin: the slice's first column in this rank's vocabulary.
        top_T: the largest logit so far; -inf before the first slice, when the other two are 0.
        total_T: the sum of exp(logit - top_T) so far.
        label_logit_T: the logit of the label, written if the slice has it.
    """
    _launch(_loss_forward, logits_Tv, label_T, top_T, total_T, label_logit_T, begin)


@kernel("titanmoe::loss_slice_backward", mutates_args=("logits_Tv",))
def loss_slice_backward(logits_Tv: Tensor, label_T: Tensor, begin: int, log_total_T: Tensor, scale_T: Tensor) -> None:
    """Overwrite a slice of logits with the gradient of the loss, (softmax - one-hot of the label) * scale.

    Args:
        label_T: the column of each token's label in this rank's vocabulary; one outside the slice, such as -1, is taken
            as no label: its one-hot is 0.
        begin: the slice's first column in this rank's vocabulary.
        log_total_T: the log-sum-exp of each token's logits over the vocabulary.
        scale_T: the factor of each token's loss.
    """
    _launch(_loss_backward, logits_Tv, label_T, log_total_T, scale_T, begin)
