"""Experts' rows filled up to whole units on CPUs.

oneDNN builds a new bf16 product for every number of rows that it has not seen recently, at half a millisecond each: a
third of the experts' time under learned routing. Whole units make row counts repeat.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT = 32
COPIED = 1 << 18
"""Copying an expert's rows to fill up units pays if they are at most this many numbers, on average."""


def pay(x_RD: Tensor, count_e: Tensor) -> bool:
    """Whether they add little, on average 16 rows to at least 128 per expert, and copying an expert's rows costs less
    than they save.
    """
    if x_RD.dtype != torch.bfloat16:
        return False
    experts = len(count_e)
    few = x_RD.shape[0] < 4 * UNIT * experts or x_RD.numel() > COPIED * experts
    return not few and bool((count_e % UNIT).any())


def fill(count_e: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fill up every expert's rows to whole units. Returns the source of each new row (`rows`: an empty one), the new
    place of each row, and the new counts.
    """
    whole_e = (count_e + UNIT - 1) // UNIT * UNIT
    added_e = (whole_e - count_e).cumsum(0) - (whole_e - count_e)  # rows inserted before an expert's first
    slot_R = torch.arange(rows) + added_e.repeat_interleave(count_e)
    source_P = torch.full((int(whole_e.sum()),), rows)
    source_P[slot_R] = torch.arange(rows)
    return source_P, slot_R, whole_e


class _Move(torch.autograd.Function):
    """Rows by their source, zeros where that is one past the last; backward takes them by `inverse`."""

    @staticmethod
    def forward(ctx, x, source, inverse):
        ctx.save_for_backward(source, inverse)
        return F.pad(x, (0, 0, 0, 1)).index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        source, inverse = ctx.saved_tensors
        return _Move.apply(grad, inverse, source), None, None


def run(
    products: Callable[[Tensor, Tensor, Tensor], Tensor], x_RD: Tensor, weight_R1: Tensor, count_e: Tensor
) -> Tensor:
    """The experts' products, in whole units where they pay."""
    if not pay(x_RD, count_e):
        return products(x_RD, weight_R1, count_e)
    source_P, slot_R, whole_e = fill(count_e, x_RD.shape[0])
    x_PD, weight_P1 = (_Move.apply(x, source_P, slot_R) for x in (x_RD, weight_R1))
    return _Move.apply(products(x_PD, weight_P1, whole_e), slot_R, source_P)
