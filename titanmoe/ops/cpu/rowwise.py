"""Element-wise chains on CPUs, a block of rows at a time: norm, rotary positions, SwiGLU.

A chain of torch operations over a large tensor passes over memory once per operation, and autograd keeps every
intermediate. Here a block of rows goes through the whole chain while it is in the cache, forward and backward, and only
the inputs are kept. The plain formulas are with the callers (`titanmoe.models.layers`, `titanmoe.moe.experts`).
Everything inside a block is computed in at least float32.

Shapes: R rows, D width of a row, N positions, H heads, h head, F hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_NUMBERS = 1 << 18
"""Numbers in a block. Fewer would fit the second-level cache, but then the calls cost more than the work."""


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _blocks(x: Tensor, scratch: int) -> Iterator[tuple[Any, ...]]:
    """The rows of a block, along x's first dim, and `scratch` wide tensors of its shape, in the same memory for every
    block: in a long run, allocating and freeing a megabyte is slow.
    """
    step = max(BLOCK_NUMBERS // max(x[:1].numel(), 1), 1)
    buffers = torch.empty(scratch, min(step, x.shape[0]), *x.shape[1:], dtype=_wide(x))
    for first in range(0, x.shape[0], step):
        rows = slice(first, min(first + step, x.shape[0]))
        yield rows, *buffers[:, : rows.stop - first].unbind()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        x_RD, wide = x.reshape(-1, x.shape[-1]), _wide(x)
        y_RD, weight = _empty(x_RD), weight_D.to(wide)
        scale_R1 = torch.empty(x_RD.shape[0], 1, dtype=wide)
        for rows, block, square in _blocks(x_RD, 2):
            torch.square(block.copy_(x_RD[rows]), out=square)
            scale = torch.mean(square, -1, keepdim=True, out=scale_R1[rows]).add_(eps).rsqrt_()
            y_RD[rows] = block.mul_(scale).mul_(weight)
        ctx.save_for_backward(x, weight_D, scale_R1)
        return y_RD.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight_D, scale_R1 = ctx.saved_tensors
        x_RD, grad_RD = (y.reshape(-1, x.shape[-1]) for y in (x, grad))
        dx_RD, weight = _empty(x_RD), weight_D.to(scale_R1.dtype)
        dweight = torch.zeros_like(weight)
        for rows, slope, normed, product in _blocks(x_RD, 3):
            scale = scale_R1[rows]
            torch.mul(slope.copy_(grad_RD[rows]), normed.copy_(x_RD[rows]).mul_(scale), out=product)
            dweight += product.sum(0)
            along = product.mul_(weight).mean(-1, keepdim=True)
            dx_RD[rows] = slope.mul_(weight).addcmul_(normed, along, value=-1).mul_(scale)
        return dx_RD.view(x.shape), dweight.to(weight_D.dtype), None


def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight_D, eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    x_NHh, (cos_N1h, sin_N1h) = x.flatten(0, 1), (y.expand(*x.shape[:2], 1, -1).flatten(0, 1) for y in (cos, sin))
    y_NHh, half = _empty(x_NHh), x.shape[-1] // 2
    before_N1i, after_N1i = sin_N1h[..., :half] * -sign, sin_N1h[..., half:] * sign
    for rows, block, rotated in _blocks(x_NHh, 2):
        block.copy_(x_NHh[rows])
        torch.mul(block[..., half:], before_N1i[rows], out=rotated[..., :half])
        torch.mul(block[..., :half], after_N1i[rows], out=rotated[..., half:])
        y_NHh[rows] = rotated.addcmul_(block, cos_N1h[rows])
    return y_NHh.view(x.shape)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BSHh, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x_BSHh, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad_BSHh):
        # Both halves of a head turn by the same angles: the transpose turns back.
        return _rotated(grad_BSHh, *ctx.saved_tensors, -1), None, None


def rotate(x_BSHh: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """rope: cos and sin, which are at least float32 and need no gradient."""
    return _Rotate.apply(x_BSHh, *rope)


def swiglu(gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor | None = None) -> Tensor:
    """silu(gate) * up * weight. Not differentiable by itself: `swiglu_backward` has the gradients."""
    h_RF = _empty(gate_RF)
    for rows, h, up in _blocks(gate_RF, 2):
        F.silu(h.copy_(gate_RF[rows]), inplace=True).mul_(up.copy_(up_RF[rows]))
        h_RF[rows] = h if weight_R1 is None else h.mul_(weight_R1[rows])
    return h_RF


def swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `swiglu` returned; the gradients of gate and up, side by side, (R, 2F); and that of weight."""
    h_RF, (R, hidden) = _empty(gate_RF), gate_RF.shape
    both = torch.empty(R, 2 * hidden, dtype=gate_RF.dtype)
    dgate_RF, dup_RF = both.chunk(2, 1)
    dweight_R1 = None if weight_R1 is None else torch.empty_like(weight_R1)
    for rows, gate, up, slope, sigmoid, active, h in _blocks(gate_RF, 6):
        torch.sigmoid(gate.copy_(gate_RF[rows]), out=sigmoid)
        torch.mul(gate, sigmoid, out=active)
        torch.mul(active, up.copy_(up_RF[rows]), out=h)
        slope.copy_(grad_RF[rows])
        if weight_R1 is not None:
            torch.sum(torch.mul(slope, h, out=gate), -1, keepdim=True, out=dweight_R1[rows])
            h.mul_(weight_R1[rows])
            slope.mul_(weight_R1[rows])
        h_RF[rows] = h
        dup_RF[rows] = torch.mul(slope, active, out=h)
        # d silu = sigmoid + silu * (1 - sigmoid)
        bend = torch.addcmul(sigmoid, active, sigmoid, value=-1, out=gate).add_(active)
        dgate_RF[rows] = bend.mul_(up).mul_(slope)
    return h_RF, both, dweight_R1


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu(*(x.reshape(-1, x.shape[-1]) for x in (gate, up))).view(gate.shape)

    @staticmethod
    def backward(ctx, grad):
        shape = grad.shape
        _, both, _ = swiglu_backward(*(x.reshape(-1, shape[-1]) for x in (grad, *ctx.saved_tensors)))
        return tuple(x.view(shape) for x in both.chunk(2, 1))


def activate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _SwiGLU.apply(gate, up)
