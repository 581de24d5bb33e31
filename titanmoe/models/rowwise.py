"""Element-wise chains on CPUs, a block of rows at a time: norm, rotary positions, SwiGLU.

A chain of torch operations over a large tensor passes over memory once per operation, and autograd keeps what lies
between them. Here a block of rows goes through the whole chain while it is in the cache, forward and backward, and
inputs alone are kept. The plain formulas stand beside the callers (`titanmoe.models.layers`, `titanmoe.moe.experts`),
which come here where `pays` says so. Everything inside a block is computed at least in float32.

Shapes: R rows, D width of a row, N positions, H heads, h head, F hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1 << 18
"""Numbers in a block. Fewer would fit the second-level cache, but then calls cost more than what they do."""


def pays(x: Tensor) -> bool:
    """Compilers fuse by themselves, and GPUs want few launches."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _blocks(x: Tensor) -> Iterator[slice]:
    """Of rows: x's first dim."""
    step = max(BLOCK // max(x[:1].numel(), 1), 1)
    return (slice(first, first + step) for first in range(0, x.shape[0], step))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        x_RD, wide = x.reshape(-1, x.shape[-1]), _wide(x)
        y_RD, weight = _empty(x_RD), weight_D.to(wide)
        scale_R1 = torch.empty(x_RD.shape[0], 1, dtype=wide)
        for rows in _blocks(x_RD):
            block = x_RD[rows].to(wide)
            scale_R1[rows] = scale = torch.rsqrt(block.square().mean(-1, keepdim=True).add_(eps))
            y_RD[rows] = (block * scale).mul_(weight)
        ctx.save_for_backward(x, weight_D, scale_R1)
        return y_RD.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight_D, scale_R1 = ctx.saved_tensors
        x_RD, grad_RD = (y.reshape(-1, x.shape[-1]) for y in (x, grad))
        dx_RD, weight = _empty(x_RD), weight_D.to(scale_R1.dtype)
        dweight = torch.zeros_like(weight)
        for rows in _blocks(x_RD):
            scale, slope = scale_R1[rows], grad_RD[rows].to(weight.dtype)
            normed = x_RD[rows].to(weight.dtype) * scale
            product = slope * normed
            dweight += product.sum(0)
            along = product.mul_(weight).mean(-1, keepdim=True)
            dx_RD[rows] = (slope * weight).addcmul_(normed, along, value=-1).mul_(scale)
        return dx_RD.view(x.shape), dweight.to(weight_D.dtype), None


def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight_D, eps)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    x_NHh, (cos_N1h, sin_N1h) = x.flatten(0, 1), (y.expand(*x.shape[:2], 1, -1).flatten(0, 1) for y in (cos, sin))
    y_NHh, half = _empty(x_NHh), x.shape[-1] // 2
    sin_N1h = torch.cat((sin_N1h[..., :half] * -sign, sin_N1h[..., half:] * sign), -1)
    for rows in _blocks(x_NHh):
        block = x_NHh[rows].to(cos.dtype)
        crossed = block.roll(half, -1).mul_(sin_N1h[rows])
        y_NHh[rows] = crossed.addcmul_(block, cos_N1h[rows])
    return y_NHh.view(x.shape)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BSHh, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(x_BSHh, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad_BSHh):
        # Both halves of a head turn by the same angles: the transpose turns back.
        return _turned(grad_BSHh, *ctx.saved_tensors, -1), None, None


def rotate(x_BSHh: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """cos and sin are at least float32 and ask for no gradient."""
    return _Rotate.apply(x_BSHh, cos, sin)


def swiglu(gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor | None = None) -> Tensor:
    """silu(gate) * up * weight. Without a gradient of its own: `swiglu_backward` has it."""
    h_RF, wide = _empty(gate_RF), _wide(gate_RF)
    for rows in _blocks(gate_RF):
        h = F.silu(gate_RF[rows].to(wide)).mul_(up_RF[rows].to(wide))
        h_RF[rows] = h if weight_R1 is None else h.mul_(weight_R1[rows])
    return h_RF


def swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `swiglu` returned, and the gradients of gate, up and weight."""
    h_RF, dgate_RF, dup_RF = (_empty(gate_RF) for _ in range(3))
    dweight_R1 = None if weight_R1 is None else torch.empty_like(weight_R1)
    wide = _wide(gate_RF)
    for rows in _blocks(gate_RF):
        gate, up = gate_RF[rows].to(wide), up_RF[rows].to(wide)
        sigmoid = gate.sigmoid()
        active = gate * sigmoid
        h, slope = active * up, grad_RF[rows].to(wide)
        if weight_R1 is not None:
            dweight_R1[rows] = (slope * h).sum(-1, keepdim=True)
            h.mul_(weight_R1[rows])
            slope = slope * weight_R1[rows]
        h_RF[rows] = h
        dup_RF[rows] = torch.mul(slope, active, out=h)
        # d silu = sigmoid + silu * (1 - sigmoid)
        bend = torch.add(sigmoid, active).addcmul_(active, sigmoid, value=-1)
        dgate_RF[rows] = bend.mul_(up).mul_(slope)
    return h_RF, dgate_RF, dup_RF, dweight_R1


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu(*(x.reshape(-1, x.shape[-1]) for x in (gate, up))).view(gate.shape)

    @staticmethod
    def backward(ctx, grad):
        shape = grad.shape
        _, *grads, _ = swiglu_backward(*(x.reshape(-1, shape[-1]) for x in (grad, *ctx.saved_tensors)))
        return tuple(x.view(shape) for x in grads)


def activate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _SwiGLU.apply(gate, up)
