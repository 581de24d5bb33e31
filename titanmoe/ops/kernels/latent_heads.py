"""Kernels for queries and keys of latent attention, of which RoPE rotates the end of each head, in one pass each.

Reference: `titanmoe.models.latent_attention`. A query's end is rotated where the product has left it, which touches
nothing else. A key is written from its own part and from the rotated key that all heads share; backward sums that one's
gradient over the heads, in float32 at least, and writes the gradients of keys and values where the product's backward
reads them. Rotations are those of `titanmoe.ops.kernels.rotate`.

Shapes: B samples, S positions, H heads, h head, n its part without positions, p its rotated part, v value, m = n + v,
X = H * h; b samples of cos and sin: B or 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import adjacent_numbers, kernel, next_power_of_2, sum_dtype
from titanmoe.ops.kernels.rotate import TILE, angles, rotate_heads


@triton.jit
def _copy_heads(x, out, HEADS: tl.constexpr, per_head, out_head, WIDTH: tl.constexpr, P: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    i = tl.arange(0, P)[None, :]
    for first in range(0, HEADS, ROWS):
        head = first + tl.arange(0, ROWS)[:, None]
        inside = (head < HEADS) & (i < WIDTH)
        tl.store(out + head * out_head + i, tl.load(x + head * per_head + i, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["S"])
def _join(plain, rotated, cos, sin, out, S, of_plain, plain_token, plain_head, of_rotated, rotated_token, rotated_head,
          of_angle, H: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, NP: tl.constexpr, P: tl.constexpr,
          SIGN: tl.constexpr, WIDE: tl.constexpr, N_ROWS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    sample, position = t // S, t % S
    c, s = angles(cos, sin, sample * of_angle + position * (2 * HALF), SIGN, HALF, P, WIDE)
    start = rotated + sample * of_rotated + position * rotated_token
    if N:
        WIDTH: tl.constexpr = N + 2 * HALF
        place = out + t * (H * WIDTH)
        _copy_heads(plain + sample * of_plain + position * plain_token, place, H, plain_head, WIDTH, N, NP, N_ROWS)
        rotate_heads(start, place + N, c, s, H, rotated_head, WIDTH, HALF, P, ROWS)
    else:  # in place
        rotate_heads(start, start, c, s, H, rotated_head, rotated_head, HALF, P, ROWS)


@triton.jit(do_not_specialize=["S"])
def _split(dk, dv, cos, sin, dkv, dkey, S, of_k, k_token, k_head, of_v, v_token, v_head, of_angle, H: tl.constexpr,
           N: tl.constexpr, V: tl.constexpr, HALF: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr, P: tl.constexpr,
           WIDE: tl.constexpr, N_ROWS: tl.constexpr, V_ROWS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    sample, position = t // S, t % S
    key, out = dk + sample * of_k + position * k_token, dkv + t * (H * (N + V))
    _copy_heads(key, out, H, k_head, N + V, N, NP, N_ROWS)
    _copy_heads(dv + sample * of_v + position * v_token, out + N, H, v_head, N + V, V, VP, V_ROWS)
    i = tl.arange(0, P)[None, :]
    x1, x2 = tl.zeros([1, P], dtype=WIDE), tl.zeros([1, P], dtype=WIDE)
    for first in range(0, H, ROWS):
        head = first + tl.arange(0, ROWS)[:, None]
        inside = (head < H) & (i < HALF)
        rotated = key + head * k_head + N + i
        x1 += tl.sum(tl.load(rotated, mask=inside, other=0.0).to(WIDE), 0)[None, :]
        x2 += tl.sum(tl.load(rotated + HALF, mask=inside, other=0.0).to(WIDE), 0)[None, :]
    c, s = angles(cos, sin, sample * of_angle + position * (2 * HALF), -1, HALF, P, WIDE)
    place = dkey + t * (2 * HALF) + i
    tl.store(place, (x1 * c - x2 * s).to(dkey.dtype.element_ty), mask=i < HALF)
    tl.store(place + HALF, (x2 * c + x1 * s).to(dkey.dtype.element_ty), mask=i < HALF)


def _tile(heads: int, width: int) -> tuple[int, int]:
    """Return (columns, heads) of a program's tile for heads of this width: powers of two, about TILE numbers."""
    columns = next_power_of_2(width)
    return columns, min(max(TILE // columns, 1), next_power_of_2(heads))


def _run_join(plain: Tensor, rotated: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int) -> None:
    """Launch the kernel that writes each head's part without positions, followed by its rotated part, to `out`.

    Args:
        plain: the part without positions of every head; of width 0 to rotate in place.
        rotated: the part to rotate, of every head, or one that all heads share.
        out: the tensor to write to; not used if `plain` has width 0.
        sign: 1, or -1 to rotate by the opposite angles.
    """
    (B, S, H, n), half, cos, sin = plain.shape, rotated.shape[3] // 2, cos.contiguous(), sin.contiguous()
    (NP, n_rows), (P, p_rows) = _tile(H, max(n, 1)), _tile(H, half)
    if B * S:
        _join[(B * S,)](
            plain, rotated, cos, sin, out, S, *plain.stride()[:3], *rotated.stride()[:2],
            rotated.stride(2) if rotated.shape[2] > 1 else 0, cos.stride(0) if len(cos) > 1 else 0, H=H, N=n, HALF=half,
            NP=NP, P=P, SIGN=sign, WIDE=sum_dtype(cos.dtype), N_ROWS=n_rows, ROWS=p_rows, num_warps=4,
        )  # fmt: skip


@kernel("titanmoe::rotate_ends", mutates_args=("x_BSHp",))
def rotate_ends(x_BSHp: Tensor, cos_bS1p: Tensor, sin_bS1p: Tensor) -> None:
    """Rotate queries or keys by their positions (RoPE), in place.

    Args:
        x_BSHp: a view of the rotated part of each head, its last p numbers.
    """
    _run_join(x_BSHp[..., :0], x_BSHp, cos_bS1p, sin_bS1p, x_BSHp, 1)


@kernel("titanmoe::join_ends")
def join_ends(plain_BSHn: Tensor, rotated_BSHp: Tensor, cos_bS1p: Tensor, sin_bS1p: Tensor, sign: int) -> Tensor:
    """Rotate one part of each head by its position (RoPE), and append it to the other part: (B, S, H, n + p).

    Args:
        plain_BSHn: the parts without positions.
        rotated_BSHp: the parts to rotate; with H = 1, one that all heads share.
        sign: 1, or -1 to rotate by the opposite angles.

    Not differentiable: `Queries` and `KeysAndValues` are.
    """
    plain, rotated = adjacent_numbers(plain_BSHn), adjacent_numbers(rotated_BSHp)
    out = plain.new_empty(*plain.shape[:3], plain.shape[3] + rotated.shape[3])
    _run_join(plain, rotated, cos_bS1p, sin_bS1p, out, sign)
    return out


@join_ends.register_fake
def _(plain_BSHn, rotated_BSHp, cos_bS1p, sin_bS1p, sign):
    return plain_BSHn.new_empty(*plain_BSHn.shape[:3], plain_BSHn.shape[3] + rotated_BSHp.shape[3])


@kernel("titanmoe::split_ends")
def split_ends(dk_BSHh: Tensor, dv_BSHv: Tensor, cos_bS1p: Tensor, sin_bS1p: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `KeysAndValues`'s inputs from those of keys and values.

    Args:
        dk_BSHh: the gradient of the keys.
        dv_BSHv: the gradient of the values.
        cos_bS1p: cosines of the angles by which the shared key was rotated.
        sin_bS1p: sines of these angles.

    Returns:
        The gradients of the keys' parts without positions and of values, side by side (B, S, H, n + v); and the
        gradient of the shared key before its rotation (B, S, 1, p), summed over heads. Both in the dtype of dk_BSHh.
    """
    dk, dv = adjacent_numbers(dk_BSHh), adjacent_numbers(dv_BSHv)
    cos, sin = cos_bS1p.contiguous(), sin_bS1p.contiguous()
    (B, S, H, h), v, half = dk.shape, dv.shape[3], cos.shape[-1] // 2
    n = h - 2 * half
    dkv, dkey = dk.new_empty(B, S, H, n + v), dk.new_empty(B, S, 1, 2 * half)
    (NP, n_rows), (VP, v_rows), (P, p_rows) = _tile(H, n), _tile(H, v), _tile(H, half)
    if B * S:
        _split[(B * S,)](
            dk, dv, cos, sin, dkv, dkey, S, *dk.stride()[:3], *dv.stride()[:3], cos.stride(0) if len(cos) > 1 else 0,
            H=H, N=n, V=v, HALF=half, NP=NP, VP=VP, P=P, WIDE=sum_dtype(cos.dtype), N_ROWS=n_rows, V_ROWS=v_rows,
            ROWS=p_rows, num_warps=4,
        )  # fmt: skip
    return dkv, dkey


@split_ends.register_fake
def _(dk_BSHh, dv_BSHv, cos_bS1p, sin_bS1p):
    (B, S, H, h), p = dk_BSHh.shape, cos_bS1p.shape[-1]
    return dk_BSHh.new_empty(B, S, H, h - p + dv_BSHv.shape[3]), dk_BSHh.new_empty(B, S, 1, p)


class Queries(torch.autograd.Function):
    """Rotates the last p numbers of each of H query heads by their positions (RoPE), in place. Differentiable.

    Its inputs are the queries (B, S, H * h), which it overwrites and returns; H; cos and sin of the angles.
    """

    @staticmethod
    def forward(ctx: Any, q_BSX: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.mark_dirty(q_BSX)
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        rotate_ends(q_BSX.unflatten(-1, (heads, -1))[..., -cos.shape[-1] :], cos, sin)
        return q_BSX

    @staticmethod
    def backward(ctx: Any, grad_BSX: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad_BSHh, p = grad_BSX.unflatten(-1, (ctx.heads, -1)), cos.shape[-1]
        grad_BSHh = join_ends(grad_BSHh[..., :-p], grad_BSHh[..., -p:], cos, sin, -1)
        return grad_BSHh.flatten(2), None, None, None


class KeysAndValues(torch.autograd.Function):
    """Autograd function that makes the keys (B, S, H, n + p) and values (a view) of latent attention.

    Its inputs are each head's key without positions and its value, side by side, and the key that all heads share,
    which is rotated by its position (RoPE) and appended to each head's key; then v, and cos and sin of the angles.
    """

    @staticmethod
    def forward(
        ctx: Any, kv_BSHm: Tensor, key_BS1p: Tensor, values: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return join_ends(kv_BSHm[..., :-values], key_BS1p, cos, sin, 1), kv_BSHm[..., -values:]

    @staticmethod
    def backward(ctx: Any, dk_BSHh: Tensor, dv_BSHv: Tensor) -> tuple[Tensor | None, ...]:
        return *split_ends(dk_BSHh, dv_BSHv, *ctx.saved_tensors), None, None, None
