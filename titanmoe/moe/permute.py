"""Tokens to routed rows and back: two linear maps, each the other's transpose, so each is the other's backward.

A row is one visit of a token to an expert. `source_R` says which token a row copies, `slot_TJ` lists a token's rows.
A source of T (one past the last token) makes a zero row; a slot of R (one past the last row) adds nothing.
No atomics: the order of every sum is fixed.

Shapes: T tokens, D width, R rows, J rows per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _copy(x_TD: Tensor, source_R: Tensor) -> Tensor:
    return F.pad(x_TD, (0, 0, 0, 1)).index_select(0, source_R)


def _sum(y_RD: Tensor, slot_TJ: Tensor) -> Tensor:
    padded = F.pad(y_RD, (0, 0, 0, 1))
    if slot_TJ.shape[1] == 1:
        return padded.index_select(0, slot_TJ[:, 0])
    return padded[slot_TJ].sum(1)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, source_R, slot_TJ):
        ctx.save_for_backward(source_R, slot_TJ)
        return _copy(x_TD, source_R)

    @staticmethod
    def backward(ctx, grad_RD):
        _, slot_TJ = ctx.saved_tensors
        return _sum(grad_RD, slot_TJ), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, source_R, slot_TJ):
        ctx.save_for_backward(source_R, slot_TJ)
        return _sum(y_RD, slot_TJ)

    @staticmethod
    def backward(ctx, grad_TD):
        source_R, _ = ctx.saved_tensors
        return _copy(grad_TD, source_R), None, None


def to_rows(x_TD: Tensor, source_R: Tensor, slot_TJ: Tensor) -> Tensor:
    """Row r is a copy of token source_R[r]."""
    return _ToRows.apply(x_TD, source_R, slot_TJ)


def to_tokens(y_RD: Tensor, source_R: Tensor, slot_TJ: Tensor) -> Tensor:
    """Token t is the sum of the rows slot_TJ[t]."""
    return _ToTokens.apply(y_RD, source_R, slot_TJ)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, order_R, inverse_R):
        ctx.save_for_backward(inverse_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx, grad_RD):
        (inverse_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, inverse_R), None, None


def reorder(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """x[order], for a permutation whose inverse is known."""
    return _Reorder.apply(x_RD, order_R, inverse_R)


def invert(order_R: Tensor) -> Tensor:
    inverse = torch.empty_like(order_R)
    inverse[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return inverse
