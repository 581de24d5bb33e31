"""A kernel that quantises rows to e4m3 with a scale each. A transposed weight is read in place, without a copy.

Reference: `titanmoe.moe.fp8.plain_quantise`. A program reads its rows twice: to find the largest number, and to divide
by it. Numbers are rounded to e4m3 in float32, by adding and subtracting a number whose last bit is e4m3's, so that the
conversion is exact: Triton's interpreter does not round correctly in it.

Shapes: R rows, W width of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import cdiv, kernel, tile_shape

TILE = 4096
ACROSS = 64
"""The rows of a program, and its columns at a time, where neighbours in memory are of different rows."""
LARGEST = tl.constexpr(448.0)


@triton.jit
def _to_e4m3(v):
    """Round float32 numbers of at most 448 to those that e4m3 has, to nearest, ties to even; the dtype stays."""
    exponent = (v.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.maximum(exponent, 127 - 6)  # smaller numbers are as far apart as those of the smallest exponent
    big = (((exponent + 20) << 23) | (1 << 22)).to(tl.float32, bitcast=True)
    return (v + big) - big


@triton.jit(do_not_specialize=["R"])
def _quantise(x, q, scale, R, INNER, of_outer, of_inner, of_column, W: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < R
    start = x + (row // INNER * of_outer + row % INNER * of_inner)[:, None]
    largest = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(0, W, COLUMNS):
        c = first + tl.arange(0, COLUMNS)[None, :]
        value = tl.load(start + c * of_column, mask=in_range[:, None] & (c < W), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(value), 1))
    s = tl.math.div_rn(largest, LARGEST)
    s = tl.where(s > 0, s, 1.0)
    tl.store(scale + row, s, mask=in_range)
    for first in range(0, W, COLUMNS):
        c = first + tl.arange(0, COLUMNS)[None, :]
        inside = in_range[:, None] & (c < W)
        value = tl.load(start + c * of_column, mask=inside, other=0.0).to(tl.float32)
        value = tl.math.div_rn(value, tl.broadcast_to(s[:, None], value.shape))
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
        tl.store(q + row[:, None] * W + c, _to_e4m3(value).to(q.dtype.element_ty), mask=inside)


def _launch_constants(x: Tensor) -> dict[str, int]:
    """Return the kernel's constants by name: W, the width of a row of x, and ROWS and COLUMNS of its tile.

    The tile is square, of ACROSS, where the numbers of a row are not adjacent in memory.
    """
    rows, columns = tile_shape(x.shape[-1], TILE) if x.stride(-1) == 1 else (ACROSS, ACROSS)
    return {"W": x.shape[-1], "ROWS": rows, "COLUMNS": columns}


@kernel("titanmoe::quantise")
def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of (R, W), or of (e, R, W) with any strides, to e4m3 numbers with a float32 scale.

    Returns:
        The numbers, of x's shape, and the scales, without its last dim, both contiguous: x is about number * scale.
        A row's scale is its largest magnitude / 448, and 1 for a row of zeros.
    """
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    outer = x if x.dim() == 3 else x.unsqueeze(0)
    R, constants = scale.numel(), _launch_constants(x)
    if R:
        _quantise[(cdiv(R, constants["ROWS"]),)](
            x, q, scale, R, outer.shape[1], *outer.stride(), **constants, num_warps=8
        )  # fmt: skip
    return q, scale


@quantise.register_fake
def _(x):
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:-1], dtype=torch.float32)
