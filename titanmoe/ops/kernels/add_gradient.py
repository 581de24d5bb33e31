"""A kernel that adds the gradients of the experts' weights to running sums, in place.

Reference: `titanmoe.moe.grouped_mm.plain_add_gradient`. A program has a tile of one expert's gradient: it sums the
outer products of that expert's routed tokens, reads the sum so far, and writes the new one. So no sum depends on the
order of execution, and a gradient is never rounded by itself.

Shapes: R routed tokens sorted by expert, e experts, N and D widths of a gradient; H weights side by side, F = N / H
rows of each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import adjacent_numbers, cdiv, kernel, sum_dtype

ROWS, TILE = 64, 128


@triton.jit
def _add_gradient(grad, x, ends, total, of_grad, of_x, of_part, of_expert, N, D, F, WIDE: tl.constexpr,
                  ADD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    expert = tl.program_id(1)
    across = tl.cdiv(D, TILE)
    n = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    d = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    gradient = tl.zeros([TILE, TILE], dtype=WIDE)
    for start in range(first, end, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        g = tl.load(grad + row * of_grad + n[None, :], mask=(row < end) & (n < N)[None, :], other=0.0)
        rows = tl.load(x + row * of_x + d[None, :], mask=(row < end) & (d < D)[None, :], other=0.0)
        gradient = tl.dot(tl.trans(g), rows, gradient, input_precision="ieee", out_dtype=WIDE)
    place = (n // F).to(tl.int64) * of_part + expert.to(tl.int64) * of_expert + n % F * D
    place = total + place[:, None] + d[None, :]
    inside = (n < N)[:, None] & (d < D)[None, :]
    if ADD:
        gradient += tl.load(place, mask=inside, other=0.0).to(WIDE)
    tl.store(place, gradient.to(total.dtype.element_ty), mask=inside)


@kernel("titanmoe::add_gradient", mutates_args=("total_HeFD",))
def add_gradient(total_HeFD: Tensor, grad_RN: Tensor, x_RD: Tensor, ends_e: Tensor, add: bool) -> None:
    """Add the gradients of H weights of each expert to their sums, in place.

    Args:
        grad_RN: the gradients of the products' outputs side by side, N = H * F.
        x_RD: the products' input.
        ends_e: the index of the routed token after each expert's last.
        add: False to overwrite the sums, with zeros for experts without tokens.
    """
    H, e, F, D = total_HeFD.shape
    grad_RN, x_RD = adjacent_numbers(grad_RN), adjacent_numbers(x_RD)
    tiles = cdiv(H * F, TILE) * cdiv(D, TILE)
    _add_gradient[(tiles, e)](
        grad_RN, x_RD, ends_e, total_HeFD, grad_RN.stride(0), x_RD.stride(0), *total_HeFD.stride()[:2], H * F, D, F,
        WIDE=sum_dtype(grad_RN.dtype), ADD=add, ROWS=ROWS, TILE=TILE, num_warps=8, num_stages=3,
    )  # fmt: skip
