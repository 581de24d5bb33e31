"""Kernels that write rows to the memory of other GPUs, and copy what arrived out of it.

References: `plain_put` and `plain_take` in `titanmoe.moe.dispatchers.symmetric_buffers`. Each row is read once and
written once, by one program, and nothing is waited for: who may write when is up to the caller. A place is rank * LIMIT
+ row of that rank's buffer; -1 stands for nowhere.

Shapes: N rows, D width, G ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import cdiv, tile_shape
from titanmoe.ops.kernels.permute_rows import TILE


@triton.jit(do_not_specialize=["N", "LIMIT"])
def _put(x, to, addresses, N, LIMIT, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.load(to + row, mask=row < N, other=-1)
    goes = place >= 0
    rank = tl.where(goes, place // LIMIT, 0)
    buffer = tl.load(addresses + rank).to(tl.pointer_type(x.dtype.element_ty))
    begin = tl.multiple_of(buffer, 16) + (place - rank * LIMIT) * D
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        in_range = goes[:, None] & (d[None, :] < D)
        tl.store(begin[:, None] + d[None, :], tl.load(x + row[:, None] * D + d[None, :], mask=in_range), mask=in_range)


def put_rows(x_ND: Tensor, to_N: Tensor, addresses_G: Tensor, limit: int) -> None:
    """Write each row to its place in the buffers of the ranks. Neither waits for other ranks nor checks the places.

    Args:
        to_N: the place of each row, rank * limit + row of that rank's buffer; -1 for a row that is not written.
        addresses_G: the addresses of the ranks' buffers, as this GPU maps them, int64.
        limit: the number of rows of each rank's buffer that may be written.
    """
    (N, D), (rows, columns) = x_ND.shape, tile_shape(x_ND.shape[1], TILE)
    if N:
        _put[(cdiv(N, rows),)](
            x_ND.contiguous(), to_N, addresses_G, N, limit, D=D, ROWS=rows, COLUMNS=columns, num_warps=8
        )


@triton.jit(do_not_specialize=["N"])
def _take(buffer, places, out, N, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    written = row < N
    arrived = tl.load(places + row, mask=written, other=-1) >= 0
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        inside = d[None, :] < D
        value = tl.load(buffer + row[:, None] * D + d[None, :], mask=arrived[:, None] & inside, other=0.0)
        tl.store(out + row[:, None] * D + d[None, :], value, mask=written[:, None] & inside)


def take_rows(buffer_ND: Tensor, from_N: Tensor) -> Tensor:
    """Return a copy of a buffer's rows, with zeros in unused ones.

    Args:
        from_N: where each row came from; -1 for an unused row, which nobody wrote.
    """
    (N, D), (rows, columns) = buffer_ND.shape, tile_shape(buffer_ND.shape[1], TILE)
    out_ND = torch.empty_like(buffer_ND)
    if N:
        _take[(cdiv(N, rows),)](buffer_ND, from_N, out_ND, N, D=D, ROWS=rows, COLUMNS=columns, num_warps=8)
    return out_ND
