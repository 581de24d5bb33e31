"""Rows by index: fetched, and summed back, with their routing weights. References: `titanmoe.moe.permute`.

Both read whole rows by an index and write each output once, so no sum depends on the order of execution. Sums are
taken in at least float32 and rounded once. An index past the last row stands for a row of zeros.

Shapes: N rows that are read, R rows that are written, T tokens, D width, K weights per token, J rows per token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import kernel, tile, wide

TILE = 4096
"""Numbers per program: 8 KiB in bfloat16, two loads of 16 bytes for each of 256 threads."""


@triton.jit(do_not_specialize=["R", "N"])
def _fetch(x, index, out, weight, weight_out, R, N, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    written = row < R
    entry = tl.load(index + row, mask=written, other=0)
    source = entry // K
    there = written & (source < N)
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        inside = d[None, :] < D
        value = tl.load(x + source[:, None] * D + d[None, :], mask=there[:, None] & inside, other=0.0)
        tl.store(out + row[:, None] * D + d[None, :], value, mask=written[:, None] & inside)
    if WEIGHTED:
        tl.store(weight_out + row, tl.load(weight + entry, mask=there, other=0.0), mask=written)


@triton.jit(do_not_specialize=["T", "R"])
def _sum(y, slot, out, weight_grad, weight_out, T, R, D: tl.constexpr, J: tl.constexpr, K: tl.constexpr,
         WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    written = token < T
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        inside = d[None, :] < D
        total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
        for j in tl.static_range(J):
            row = tl.load(slot + token * J + j, mask=written, other=0)
            there = written & (row < R)
            total += tl.load(y + row[:, None] * D + d[None, :], mask=there[:, None] & inside, other=0.0).to(WIDE)
        tl.store(out + token[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=written[:, None] & inside)
    if WEIGHTED:
        for k in tl.static_range(K):
            weight = tl.zeros([ROWS], dtype=weight_out.dtype.element_ty)
            for copy in tl.static_range(J // K):
                row = tl.load(slot + token * J + k * (J // K) + copy, mask=written, other=0)
                weight += tl.load(weight_grad + row, mask=written & (row < R), other=0.0)
            tl.store(weight_out + token * K + k, weight, mask=written)


def _launch_fetch(x: Tensor, index_R: Tensor, weight: Tensor | None, K: int) -> tuple[Tensor, Tensor]:
    x, index_R = x.contiguous(), index_R.contiguous()
    R, (N, D) = index_R.numel(), x.shape
    out = x.new_empty(R, D)
    weight_out = out if weight is None else weight.new_empty(R, 1)
    rows, columns = tile(D, TILE)
    if R:
        _fetch[(triton.cdiv(R, rows),)](
            x, index_R, out, out if weight is None else weight.contiguous(), weight_out, R, N,
            D=D, K=K, ROWS=rows, COLUMNS=columns, WEIGHTED=weight is not None, num_warps=8,
        )  # fmt: skip
    return out, weight_out


def _launch_sum(y: Tensor, slot: Tensor, weight_grad: Tensor | None, K: int) -> tuple[Tensor, Tensor]:
    y, slot = y.contiguous(), slot.contiguous()
    (T, J), (R, D) = slot.shape, y.shape
    out = y.new_empty(T, D)
    weight_out = out if weight_grad is None else weight_grad.new_empty(T, K)
    rows, columns = tile(D, TILE)
    if T:
        _sum[(triton.cdiv(T, rows),)](
            y, slot, out, out if weight_grad is None else weight_grad.contiguous(), weight_out, T, R,
            D=D, J=J, K=K, WIDE=wide(y.dtype), ROWS=rows, COLUMNS=columns, WEIGHTED=weight_grad is not None,
            num_warps=8,
        )  # fmt: skip
    return out, weight_out


@kernel("titanmoe::fetch_rows")
def fetch_rows(x_ND: Tensor, index_R: Tensor) -> Tensor:
    """(R, D): row index_R[r] of x, zeros where that is N."""
    return _launch_fetch(x_ND, index_R, None, 1)[0]


@fetch_rows.register_fake
def _(x_ND, index_R):
    return x_ND.new_empty(index_R.shape[0], x_ND.shape[1])


@kernel("titanmoe::fetch_weighted_rows")
def fetch_weighted_rows(x_TD: Tensor, weights_TK: Tensor, entry_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R, D) and (R, 1): token entry // K of x and weight `entry`; zeros where entry is T * K."""
    return _launch_fetch(x_TD, entry_R, weights_TK, weights_TK.shape[1])


@fetch_weighted_rows.register_fake
def _(x_TD, weights_TK, entry_R):
    return x_TD.new_empty(entry_R.shape[0], x_TD.shape[1]), weights_TK.new_empty(entry_R.shape[0], 1)


@kernel("titanmoe::sum_rows")
def sum_rows(y_RD: Tensor, slot_TJ: Tensor) -> Tensor:
    """(T, D): the sum of the rows slot_TJ[t], those numbered R left out."""
    return _launch_sum(y_RD, slot_TJ, None, 1)[0]


@sum_rows.register_fake
def _(y_RD, slot_TJ):
    return y_RD.new_empty(slot_TJ.shape[0], y_RD.shape[1])


@kernel("titanmoe::sum_weighted_rows")
def sum_weighted_rows(y_RD: Tensor, weight_R1: Tensor, slot_TJ: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """(T, D) and (T, K): the transpose of fetch_weighted_rows; J / K rows share a weight."""
    return _launch_sum(y_RD, slot_TJ, weight_R1, K)


@sum_weighted_rows.register_fake
def _(y_RD, weight_R1, slot_TJ, K):
    return y_RD.new_empty(slot_TJ.shape[0], y_RD.shape[1]), weight_R1.new_empty(slot_TJ.shape[0], K)
