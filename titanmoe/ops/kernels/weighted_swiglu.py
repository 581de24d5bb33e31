"""Kernels for the input of the experts' down projection in one pass: activation, product and routing weight; gradients.

Reference: `titanmoe.moe.expert_products.plain_swiglu`, which rounds after each operation; here all is float32 (or
float64) until a single rounding at the end. With a = act(gate), u = up (clamped: min(gate, 7), up within 7, + 1):

    h = a * u * w     dw = sum_F dh * a * u     dup = dh * w * a     dgate = dh * w * u * act'(gate)

Gate and up, and their gradients, may lie side by side in one tensor.

Shapes: R routed tokens, F hidden width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import adjacent_numbers, cdiv, kernel, sum_dtype, tile_shape

TILE = 2048


@triton.jit
def _activate(gate, up, CLAMPED: tl.constexpr):
    """Compute a SwiGLU activation elementwise, clamped as gpt-oss's if CLAMPED.

    Returns:
        a = act(gate); its derivative; u, the factor of a in a * u: up, or if CLAMPED up limited to [-7, 7], plus 1; and
        whether u passes a gradient to up.
    """
    if CLAMPED:
        clamped_gate = tl.minimum(gate, 7.0)
        sigmoid = 1 / (1 + tl.exp(-1.702 * clamped_gate))
        act = clamped_gate * sigmoid
        slope = tl.where(gate <= 7.0, sigmoid + 1.702 * act * (1 - sigmoid), 0.0)
        passes = (up <= 7.0) & (up >= -7.0)
        factor = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1
    else:
        sigmoid = 1 / (1 + tl.exp(-gate))
        act = gate * sigmoid
        slope = sigmoid + act * (1 - sigmoid)
        passes = up == up
        factor = up
    return act, slope, factor, passes


@triton.jit(do_not_specialize=["R"])
def _swiglu_forward(gate, up, weight, out, R, F: tl.constexpr, OF_GATE: tl.constexpr, OF_UP: tl.constexpr,
                    WIDE: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.load(weight + row, mask=row < R, other=0.0).to(WIDE)
    for first in range(0, F, COLUMNS):
        f = first + tl.arange(0, COLUMNS)
        inside = (row < R)[:, None] & (f < F)[None, :]
        g = tl.load(gate + row[:, None] * OF_GATE + f[None, :], mask=inside, other=0.0).to(WIDE)
        u = tl.load(up + row[:, None] * OF_UP + f[None, :], mask=inside, other=0.0).to(WIDE)
        act, _, factor, _ = _activate(g, u, CLAMPED)
        place = row[:, None] * F + f[None, :]
        tl.store(out + place, (act * factor * w[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _swiglu_backward(grad, gate, up, weight, out, grad_both, grad_weight, R, F: tl.constexpr, OF_GATE: tl.constexpr,
                     OF_UP: tl.constexpr, WIDE: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr,
                     COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.load(weight + row, mask=row < R, other=0.0).to(WIDE)
    total = tl.zeros([ROWS], dtype=WIDE)
    for first in range(0, F, COLUMNS):
        f = first + tl.arange(0, COLUMNS)
        inside = (row < R)[:, None] & (f < F)[None, :]
        place = row[:, None] * F + f[None, :]
        dh = tl.load(grad + place, mask=inside, other=0.0).to(WIDE)
        g = tl.load(gate + row[:, None] * OF_GATE + f[None, :], mask=inside, other=0.0).to(WIDE)
        u = tl.load(up + row[:, None] * OF_UP + f[None, :], mask=inside, other=0.0).to(WIDE)
        act, slope, factor, passes = _activate(g, u, CLAMPED)
        total += tl.sum(dh * act * factor, 1)
        tl.store(out + place, (act * factor * w[:, None]).to(out.dtype.element_ty), mask=inside)
        dh = dh * w[:, None]
        half = grad_both + row[:, None] * 2 * F + f[None, :]
        tl.store(half, (dh * factor * slope).to(out.dtype.element_ty), mask=inside)
        tl.store(half + F, tl.where(passes, dh * act, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(grad_weight + row, total.to(grad_weight.dtype.element_ty), mask=row < R)


@kernel("titanmoe::weighted_swiglu")
def weighted_swiglu(gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool) -> Tensor:
    """Compute act(gate) * up * routing weight: (R, F), in gate's dtype. Not differentiable.

    Args:
        clamped: whether gate and up are clamped and up is increased by 1, as in gpt-oss; else it is SwiGLU.
    """
    gate_RF, up_RF, weight_R1 = adjacent_numbers(gate_RF), adjacent_numbers(up_RF), weight_R1.contiguous()
    (R, F), out = gate_RF.shape, gate_RF.new_empty(gate_RF.shape)
    rows, columns = tile_shape(F, TILE)
    if R:
        _swiglu_forward[(cdiv(R, rows),)](
            gate_RF, up_RF, weight_R1, out, R,
            F=F, OF_GATE=gate_RF.stride(0), OF_UP=up_RF.stride(0), WIDE=sum_dtype(gate_RF.dtype), CLAMPED=clamped,
            ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return out


@weighted_swiglu.register_fake
def _(gate_RF, up_RF, weight_R1, clamped):
    return gate_RF.new_empty(gate_RF.shape)


@kernel("titanmoe::weighted_swiglu_backward")
def weighted_swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute act(gate) * up * routing weight, and its gradients.

    Args:
        grad_RF: the gradient of that product.
        clamped: whether gate and up are clamped and up is increased by 1, as in gpt-oss; else it is SwiGLU.

    Returns:
        The product (R, F); the gradients of gate and up side by side (R, 2F); and the gradient of
        the routing weights (R, 1).
    """
    gate_RF, up_RF = adjacent_numbers(gate_RF), adjacent_numbers(up_RF)
    grad_RF, weight_R1 = grad_RF.contiguous(), weight_R1.contiguous()
    R, F = gate_RF.shape
    outputs = gate_RF.new_empty(R, F), gate_RF.new_empty(R, 2 * F), torch.empty_like(weight_R1)
    rows, columns = tile_shape(F, TILE)
    if R:
        _swiglu_backward[(cdiv(R, rows),)](
            grad_RF, gate_RF, up_RF, weight_R1, *outputs, R,
            F=F, OF_GATE=gate_RF.stride(0), OF_UP=up_RF.stride(0), WIDE=sum_dtype(gate_RF.dtype), CLAMPED=clamped,
            ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return outputs


@weighted_swiglu_backward.register_fake
def _(grad_RF, gate_RF, up_RF, weight_R1, clamped):
    R, F = gate_RF.shape
    return gate_RF.new_empty(R, F), gate_RF.new_empty(R, 2 * F), weight_R1.new_empty(weight_R1.shape)
