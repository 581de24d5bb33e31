"""A kernel that splits float32 numbers into three bfloat16 terms that add up to them exactly.

Reference: `titanmoe.moe.router_product.plain_bfloat16_terms`, which says how they are laid out.

Shapes: R rows, C numbers of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import cdiv, kernel

TILE = 1024
"""The numbers of a program."""


@triton.jit(do_not_specialize=["N"])
def _bfloat16_terms(x, out, N, C, BACKWARDS: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = i < N
    value = tl.load(x + i, mask=inside, other=0.0)
    first = value.to(tl.bfloat16)
    rest = value - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    place, on = out + i // C * (4 * C) + i % C, C
    if BACKWARDS:
        place, on = place + 3 * C, -C
    tl.store(place, first, mask=inside)
    tl.store(place + on, first, mask=inside)
    tl.store(place + 2 * on, second, mask=inside)
    tl.store(place + 3 * on, third, mask=inside)


@kernel("titanmoe::bfloat16_terms")
def bfloat16_terms(x_RC: Tensor, backwards: bool) -> Tensor:
    """Split float32 numbers into three bfloat16 terms that sum to them, the first one twice: (R, 4, C).

    x_RC has to be contiguous. The order along dim 1 is first, first, second, third; reversed if `backwards`.
    """
    (R, C), N = x_RC.shape, x_RC.numel()
    out = x_RC.new_empty(R, 4, C, dtype=torch.bfloat16)
    if N:
        _bfloat16_terms[(cdiv(N, TILE),)](x_RC, out, N, C, BACKWARDS=backwards, TILE=TILE, num_warps=4)
    return out


@bfloat16_terms.register_fake
def _(x_RC, backwards):
    """Return an empty tensor like `bfloat16_terms`'s result, (R, 4, C) in either order, for tracing."""
    R, C = x_RC.shape
    return x_RC.new_empty(R, 4, C, dtype=torch.bfloat16)
