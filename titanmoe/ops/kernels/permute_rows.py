"""Kernels that fetch rows by index and sum them back, with their routing weights. References: `titanmoe.moe.permute`.

Both read full rows by an index and write each output once, so no sum depends on the order of execution. Sums are taken
in at least float32 and rounded once. An index past the last row stands for a row of zeros.

A packed row is a row and, in the 16 bytes after it, the bits of its routing weight, so that one message has both.

Shapes: N rows that are fetched from, T tokens that rows are summed to, R rows of a buffer of routed tokens, sent or
received, that a fetch writes and a sum reads, D width, P width of a packed row, K weights per token, J rows per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import cdiv, kernel, sum_dtype, tile_shape

TILE = 4096
"""The numbers per program: 8 KiB in bfloat16, two loads of 16 bytes for each of 256 threads."""
SPACE = 16
"""The bytes after a packed row, so that the next one begins where 16 bytes can be read at once."""


@triton.jit(do_not_specialize=["R", "N"])
def _fetch_rows(x, index, out, weight, weight_out, R, N, D: tl.constexpr, K: tl.constexpr, OF_X: tl.constexpr,
                OF_OUT: tl.constexpr, OF_WEIGHT: tl.constexpr, OF_WEIGHT_OUT: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    written = row < R
    entry = tl.load(index + row, mask=written, other=0)
    source = entry // K
    in_range = written & (source < N)
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        inside = d[None, :] < D
        value = tl.load(x + source[:, None] * OF_X + d[None, :], mask=in_range[:, None] & inside, other=0.0)
        tl.store(out + row[:, None] * OF_OUT + d[None, :], value, mask=written[:, None] & inside)
    if WEIGHTED:
        value = tl.load(weight + source * OF_WEIGHT + entry % K, mask=in_range, other=0.0)
        tl.store(weight_out + row * OF_WEIGHT_OUT, value, mask=written)


@triton.jit(do_not_specialize=["T", "R"])
def _sum_rows(y, slot, out, weight_grad, weight_out, T, R, D: tl.constexpr, J: tl.constexpr, K: tl.constexpr,
              OF_Y: tl.constexpr, OF_WEIGHT: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    written = token < T
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        inside = d[None, :] < D
        total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
        for j in tl.static_range(J):
            row = tl.load(slot + token * J + j, mask=written, other=0)
            in_range = written & (row < R)
            total += tl.load(y + row[:, None] * OF_Y + d[None, :], mask=in_range[:, None] & inside, other=0.0).to(WIDE)
        tl.store(out + token[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=written[:, None] & inside)
    if WEIGHTED:
        for k in tl.static_range(K):
            weight = tl.zeros([ROWS], dtype=weight_out.dtype.element_ty)
            for copy in tl.static_range(J // K):
                row = tl.load(slot + token * J + k * (J // K) + copy, mask=written, other=0)
                weight += tl.load(weight_grad + row * OF_WEIGHT, mask=written & (row < R), other=0.0)
            tl.store(weight_out + token * K + k, weight, mask=written)


def _launch_fetch(x: Tensor, index_R: Tensor, weight: Tensor, K: int, out: Tensor, weight_out: Tensor) -> None:
    """Launch the kernel that copies rows of x by index to `out`, and their routing weights to `weight_out`.

    Args:
        x: the rows to read.
        index_R: for each row of `out`, the row of x times K, plus the number of its weight; N * K for zeros.
        weight: the routing weights, K for each row of x.
        K: the number of weights of a row.
        weight_out: the weights to write; `out` itself if there are no weights.
    """
    index_R, weighted = index_R.contiguous(), weight_out is not out
    R, (N, D) = index_R.numel(), x.shape
    rows, columns = tile_shape(D, TILE)
    if R:
        _fetch_rows[(cdiv(R, rows),)](
            x, index_R, out, weight, weight_out, R, N, D=D, K=K,
            OF_X=x.stride(0), OF_OUT=out.stride(0), OF_WEIGHT=weight.stride(0), OF_WEIGHT_OUT=weight_out.stride(0),
            ROWS=rows, COLUMNS=columns, WEIGHTED=weighted, num_warps=8,
        )  # fmt: skip


def _launch_sum(y: Tensor, slot: Tensor, weight_grad: Tensor | None, K: int) -> tuple[Tensor, Tensor]:
    """Launch the kernel that sums rows of y by token, and the gradients of their routing weights.

    Args:
        slot: the J rows of each token.
        weight_grad: the gradient of each row's weight; None if there are no weights.
        K: the number of weights of a token.

    Returns:
        The sums of rows (T, D), and the sums of weight gradients (T, K); without weights the first twice.
    """
    slot = slot.contiguous()
    (T, J), (R, D) = slot.shape, y.shape
    out = y.new_empty(T, D)
    weight_out = out if weight_grad is None else weight_grad.new_empty(T, K)
    weight_grad = out if weight_grad is None else weight_grad
    rows, columns = tile_shape(D, TILE)
    if T:
        _sum_rows[(cdiv(T, rows),)](
            y, slot, out, weight_grad, weight_out, T, R, D=D, J=J, K=K,
            OF_Y=y.stride(0), OF_WEIGHT=weight_grad.stride(0), WIDE=sum_dtype(y.dtype),
            ROWS=rows, COLUMNS=columns, WEIGHTED=weight_out is not out, num_warps=8,
        )  # fmt: skip
    return out, weight_out


@kernel("titanmoe::fetch_rows")
def fetch_rows(x_ND: Tensor, index_R: Tensor) -> Tensor:
    """Copy row index_R[r] of x_ND for each r: (R, D). An index of N gives zeros. Not differentiable."""
    x_ND, out = x_ND.contiguous(), x_ND.new_empty(index_R.numel(), x_ND.shape[1])
    _launch_fetch(x_ND, index_R, out, 1, out, out)
    return out


@fetch_rows.register_fake
def _(x_ND, index_R):
    return x_ND.new_empty(index_R.shape[0], x_ND.shape[1])


@kernel("titanmoe::fetch_weighted_rows")
def fetch_weighted_rows(x_TD: Tensor, weights_TK: Tensor, choice_R: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the token and the routing weight of each choice. Not differentiable.

    Args:
        choice_R: choices, numbered token * K + k; T * K gives zeros.

    Returns:
        Tokens (R, D) and routing weights (R, 1).
    """
    out = x_TD.new_empty(choice_R.numel(), x_TD.shape[1]), weights_TK.new_empty(choice_R.numel(), 1)
    _launch_fetch(x_TD.contiguous(), choice_R, weights_TK.contiguous(), weights_TK.shape[1], *out)
    return out


@fetch_weighted_rows.register_fake
def _(x_TD, weights_TK, choice_R):
    return x_TD.new_empty(choice_R.shape[0], x_TD.shape[1]), weights_TK.new_empty(choice_R.shape[0], 1)


@kernel("titanmoe::sum_rows")
def sum_rows(y_RD: Tensor, slot_TJ: Tensor) -> Tensor:
    """Sum the rows y_RD[slot_TJ[t]] for each token t: (T, D). Slot R stands for no row. Not differentiable."""
    return _launch_sum(y_RD.contiguous(), slot_TJ, None, 1)[0]


@sum_rows.register_fake
def _(y_RD, slot_TJ):
    return y_RD.new_empty(slot_TJ.shape[0], y_RD.shape[1])


@kernel("titanmoe::sum_weighted_rows")
def sum_weighted_rows(y_RD: Tensor, weight_R1: Tensor, slot_TJ: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Sum rows and weights by token: the transpose of `fetch_weighted_rows`. Not differentiable.

    Args:
        weight_R1: a weight for each row.
        slot_TJ: the rows of each token; R for no row. J / K consecutive ones belong to one choice.
        K: the number of choices of a token.

    Returns:
        The sum of each token's rows (T, D), and of each choice's weights (T, K).
    """
    return _launch_sum(y_RD.contiguous(), slot_TJ, weight_R1.contiguous(), K)


@sum_weighted_rows.register_fake
def _(y_RD, weight_R1, slot_TJ, K):
    return y_RD.new_empty(slot_TJ.shape[0], y_RD.shape[1]), weight_R1.new_empty(slot_TJ.shape[0], K)


def split_packed(packed_RP: Tensor, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of the routed tokens (R, D) and of the routing weights (R, 1, of weight_dtype) in packed rows."""
    size, D = packed_RP.element_size(), packed_RP.shape[1] - SPACE // packed_RP.element_size()
    first = D * size // weight_dtype.itemsize
    return packed_RP[:, :D], packed_RP.view(weight_dtype)[:, first : first + 1]


@kernel("titanmoe::fetch_packed_rows")
def fetch_packed_rows(x_TD: Tensor, weights_TK: Tensor, choice_R: Tensor) -> Tensor:
    """Copy the token and the routing weight of each choice into one packed row: (R, P). Not differentiable.

    Args:
        choice_R: choices, numbered token * K + k; T * K gives zeros.
    """
    packed_RP = x_TD.new_empty(choice_R.numel(), x_TD.shape[1] + SPACE // x_TD.element_size())
    out = split_packed(packed_RP, weights_TK.dtype)
    _launch_fetch(x_TD.contiguous(), choice_R, weights_TK.contiguous(), weights_TK.shape[1], *out)
    return packed_RP


@fetch_packed_rows.register_fake
def _(x_TD, weights_TK, choice_R):
    return x_TD.new_empty(choice_R.shape[0], x_TD.shape[1] + SPACE // x_TD.element_size())


@kernel("titanmoe::fetch_unpacked_rows")
def fetch_unpacked_rows(packed_NP: Tensor, index_R: Tensor, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy the packed rows index_R[r], split into routed tokens (R, D) and routing weights (R, 1). Not differentiable.

    Args:
        index_R: for each row of the result, the row to copy; N gives zeros.
        weight_dtype: the dtype of the packed weights.
    """
    x_ND, weight_N1 = split_packed(packed_NP.contiguous(), weight_dtype)
    out = x_ND.new_empty(index_R.numel(), x_ND.shape[1]), weight_N1.new_empty(index_R.numel(), 1)
    _launch_fetch(x_ND, index_R, weight_N1, 1, *out)
    return out


@fetch_unpacked_rows.register_fake
def _(packed_NP, index_R, weight_dtype):
    R, D = index_R.shape[0], packed_NP.shape[1] - SPACE // packed_NP.element_size()
    return packed_NP.new_empty(R, D), packed_NP.new_empty(R, 1, dtype=weight_dtype)


@kernel("titanmoe::sum_packed_rows")
def sum_packed_rows(packed_RP: Tensor, slot_TJ: Tensor, K: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sum packed rows (a routed token and its weight) by token. Not differentiable.

    Args:
        slot_TJ: the rows of each token; R for no row. J / K consecutive ones belong to one choice.
        K: the number of choices of a token.
        weight_dtype: the dtype of the packed weights.

    Returns:
        The sum of each token's rows (T, D), and of each choice's weights (T, K).
    """
    y_RD, weight_R1 = split_packed(packed_RP.contiguous(), weight_dtype)
    return _launch_sum(y_RD, slot_TJ, weight_R1, K)


@sum_packed_rows.register_fake
def _(packed_RP, slot_TJ, K, weight_dtype):
    T, D = slot_TJ.shape[0], packed_RP.shape[1] - SPACE // packed_RP.element_size()
    return packed_RP.new_empty(T, D), packed_RP.new_empty(T, K, dtype=weight_dtype)
