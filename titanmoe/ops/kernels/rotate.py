"""A kernel that rotates queries and keys by their positions (RoPE) in one pass.

Reference: `titanmoe.models.layers.plain_rotate`. A program has a token and all its heads, so the token's cos and sin
are read once. Both halves of a head rotate by the same angles, so only half of those are read:

    y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin

Backward rotates by the opposite angles. Everything is float32 (or float64) until a single rounding at the end.

Shapes: B samples, S positions, H query heads, G key heads, h head width, b samples of cos and sin: B or 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import adjacent_numbers, kernel, next_power_of_2, sum_dtype

TILE = 2048
"""The pairs of numbers per step of a program."""


@triton.jit
def angles(cos, sin, offset, SIGN: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr):
    """Load the cosines and sines of a token's angles as (1, P) tiles; the sines are multiplied by SIGN.

    Args:
        cos: pointer to the cosines.
        sin: pointer to the sines.
        offset: offset of the token's first angle.
        SIGN: 1, or -1 to rotate by the opposite angles.
        HALF: half the width of a head, the number of angles.
        P: HALF rounded up to a power of two.
        WIDE: the dtype of the tiles, in which to compute.
    """
    i = tl.arange(0, P)
    c = tl.load(cos + offset + i, mask=i < HALF, other=0.0).to(WIDE)[None, :]
    return c, tl.load(sin + offset + i, mask=i < HALF, other=0.0).to(WIDE)[None, :] * SIGN


@triton.jit
def rotate_heads(x, out, c, s, HEADS: tl.constexpr, per_head, out_head, HALF: tl.constexpr, P: tl.constexpr,
                 ROWS: tl.constexpr):  # fmt: skip
    """Rotate all heads of one token by its angles. `out` may be x, to rotate in place.

    Args:
        x: pointer to the first head.
        out: pointer to where the first rotated head goes.
        c: cosines from `angles`.
        s: sines from `angles`.
        per_head: elements from one head of x to the next.
        out_head: elements from one head of `out` to the next.
        HALF: half the width of a head.
        P: HALF rounded up to a power of two.
        ROWS: the heads that are rotated at a time.
    """
    i = tl.arange(0, P)[None, :]
    for first in range(0, HEADS, ROWS):
        head = first + tl.arange(0, ROWS)[:, None]
        inside = (head < HEADS) & (i < HALF)
        x1 = tl.load(x + head * per_head + i, mask=inside, other=0.0).to(c.dtype)
        x2 = tl.load(x + head * per_head + HALF + i, mask=inside, other=0.0).to(c.dtype)
        place = out + head * out_head + i
        tl.store(place, (x1 * c - x2 * s).to(out.dtype.element_ty), mask=inside)
        tl.store(place + HALF, (x2 * c + x1 * s).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["S"])
def _rotate(q, k, cos, sin, q_out, k_out, S, of_q, of_k, q_token, k_token, q_head, k_head, of_angle, H: tl.constexpr,
            G: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, SIGN: tl.constexpr, WIDE: tl.constexpr,
            ROWS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    sample, position = t // S, t % S
    WIDTH: tl.constexpr = 2 * HALF
    c, s = angles(cos, sin, sample * of_angle + position * WIDTH, SIGN, HALF, P, WIDE)
    rotate_heads(q + sample * of_q + position * q_token, q_out + t * (H * WIDTH), c, s, H, q_head, WIDTH, HALF, P, ROWS)
    rotate_heads(k + sample * of_k + position * k_token, k_out + t * (G * WIDTH), c, s, G, k_head, WIDTH, HALF, P, ROWS)


@kernel("titanmoe::rotate")
def rotate(q_BSHh: Tensor, k_BSGh: Tensor, cos_bS1h: Tensor, sin_bS1h: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions (RoPE), and return both. Not differentiable.

    Args:
        sign: 1, or -1 to rotate by the opposite angles.
    """
    q, k, cos, sin = adjacent_numbers(q_BSHh), adjacent_numbers(k_BSGh), cos_bS1h.contiguous(), sin_bS1h.contiguous()
    (B, S, H, h), G = q.shape, k.shape[2]
    out = q.new_empty(q.shape), k.new_empty(k.shape)
    half = h // 2
    padded = next_power_of_2(half)
    if B * S:
        _rotate[(B * S,)](
            q, k, cos, sin, *out, S, q.stride(0), k.stride(0), q.stride(1), k.stride(1), q.stride(2), k.stride(2),
            cos.stride(0) if len(cos) > 1 else 0, H=H, G=G, HALF=half, P=padded, SIGN=sign, WIDE=sum_dtype(cos.dtype),
            ROWS=min(max(TILE // padded, 1), next_power_of_2(max(H, G))), num_warps=4,
        )  # fmt: skip
    return out


@rotate.register_fake
def _(q_BSHh, k_BSGh, cos_bS1h, sin_bS1h, sign):
    return q_BSHh.new_empty(q_BSHh.shape), k_BSGh.new_empty(k_BSGh.shape)


class Rotate(torch.autograd.Function):
    """Rotates queries and keys by their positions (RoPE). Differentiable.

    Its inputs are those of `rotate` without the sign.
    """

    @staticmethod
    def forward(ctx, q_BSHh, k_BSGh, cos_bS1h, sin_bS1h):
        ctx.save_for_backward(cos_bS1h, sin_bS1h)
        q, k = rotate(q_BSHh, k_BSGh, cos_bS1h, sin_bS1h, 1)
        if not k.shape[2]:  # then no zeros are made for its gradient
            ctx.mark_non_differentiable(k)
            ctx.set_materialize_grads(False)
        return q, k

    @staticmethod
    def backward(ctx, grad_q_BSHh, grad_k_BSGh):
        if grad_k_BSGh is not None:
            return *rotate(grad_q_BSHh, grad_k_BSGh, *ctx.saved_tensors, -1), None, None
        B, S, _, h = grad_q_BSHh.shape
        return rotate(grad_q_BSHh, grad_q_BSHh.new_empty(B, S, 0, h), *ctx.saved_tensors, -1)[0], None, None, None
