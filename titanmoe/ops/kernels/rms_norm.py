"""Kernels for the RMSNorm of rows in one pass, forward and backward.

Reference: `titanmoe.models.layers.plain_norm`. With r = 1 / sqrt(mean(x^2) + eps), all means over a row's D numbers:

    y = x r w        dx = r (dy w - x r^2 mean(dy w x))        dw = sum of dy x r over rows

Backward recomputes r from x, which moves fewer bytes than a saved r. Sums of dw are added in a fixed order. Everything
is float32 (or float64) until a single rounding at the end.

Shapes: R rows, which may be farther apart than they are long, D width of a row, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.autograd_functions import apply_function, as_non_leaf, wants_gradient
from titanmoe.ops.kernels.kernel_launch import adjacent_numbers, cdiv, kernel, next_power_of_2, sum_dtype

NUMBERS = 16
"""The numbers of a block of rows that each thread holds. Backward has four such blocks in some 100 registers."""
WARPS = 132 * 20
"""The warps of backward's programs, whatever the device, so that dw is the same on all.

20 on each multiprocessor of an H100 or H200: the number, among those scripts/gpu/norms.py tries, that is within 5 % of
the fastest at both widths.
"""


@triton.jit(do_not_specialize=["R"])
def _rms_norm_forward(x, weight, out, R, of_x, D: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr,
                      ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, COLUMNS)[None, :]
    inside = (row < R) & (d < D)
    value = tl.load(x + row * of_x + d, mask=inside, other=0.0).to(WIDE)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(WIDE)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + EPS)[:, None]
    tl.store(out + row * D + d, (value * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _rms_norm_backward(grad, x, weight, grad_x, sums, R, of_grad, of_x, D: tl.constexpr, EPS: tl.constexpr,
                       WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                       WEIGHT_GRAD: tl.constexpr):  # fmt: skip
    d = tl.arange(0, COLUMNS)[None, :]
    w = tl.load(weight + d, mask=d < D, other=0.0).to(WIDE)
    total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for block in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < R) & (d < D)
        value = tl.load(x + row * of_x + d, mask=inside, other=0.0).to(WIDE)
        dy = tl.load(grad + row * of_grad + d, mask=inside, other=0.0).to(WIDE)
        slope = dy * w
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + EPS)[:, None]
        along = scale * scale * (tl.sum(slope * value, 1) / D)[:, None]
        tl.store(grad_x + row * D + d, (scale * (slope - value * along)).to(grad_x.dtype.element_ty), mask=inside)
        if WEIGHT_GRAD:
            total += dy * value * scale
    if WEIGHT_GRAD:
        tl.store(sums + tl.program_id(0) * D + tl.arange(0, COLUMNS), tl.sum(total, 0), mask=tl.arange(0, COLUMNS) < D)


def _block(width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the launch options of a kernel by name, such as ROWS of a program's tile and warps.

    Args:
        width: numbers of a row.
        dtype: dtype of the rows: float64 halves the numbers of a thread.
    """
    columns, of_thread = next_power_of_2(width), NUMBERS // 2 if dtype == torch.float64 else NUMBERS
    warps = min(max(columns // (32 * of_thread), 4), 32)
    rows = max(warps * 32 * of_thread // columns, 1)
    return dict(D=width, WIDE=sum_dtype(dtype), ROWS=rows, COLUMNS=columns, num_warps=warps)


def _flatten_to_rows(x: Tensor) -> Tensor:
    """Return x as a 2-D tensor (R, D) whose rows are contiguous; copy it only if no such view exists."""
    return adjacent_numbers(x.reshape(-1, x.shape[-1]))


@kernel("titanmoe::rms_norm_forward")
def rms_norm_forward(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dim. Not differentiable."""
    x_RD, out, options = _flatten_to_rows(x), x.new_empty(x.shape), _block(x.shape[-1], x.dtype)
    if R := len(x_RD):
        programs = cdiv(R, options["ROWS"])
        _rms_norm_forward[(programs,)](x_RD, weight_D.contiguous(), out, R, x_RD.stride(0), EPS=eps, **options)
    return out


@rms_norm_forward.register_fake
def _(x, weight_D, eps):
    return x.new_empty(x.shape)


def _backward_programs(x: Tensor) -> int:
    """Return how many Triton programs backward launches for an input of x's shape and dtype.

    They are at most WARPS / warps of a program, on any device: each loops over many blocks of rows.
    """
    options = _block(x.shape[-1], x.dtype)
    return min(cdiv(x.numel() // x.shape[-1], options["ROWS"]), max(WARPS // options["num_warps"], 1))


def _empty_weight_sums(x: Tensor, wanted: bool) -> Tensor:
    """Allocate the tensor (P, D) to which each of P programs writes its sum of the weight's gradient.

    P is `_backward_programs`, or 0 if the gradient is not wanted. Its dtype is float32, or float64 for x in float64.
    """
    return x.new_empty(
        _backward_programs(x) if wanted else 0, x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32)
    )


@kernel("titanmoe::rms_norm_backward")
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, eps: float, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x / sqrt(mean(x^2) + eps) * weight.

    Args:
        grad: the gradient of that result.
        eps: added to the mean square.
        weight_grad: whether to compute the weight's gradient.

    Returns:
        The gradient of x; and summands (P, D) of the weight's gradient, to be added over P; P = 0 without weight_grad.
    """
    grad_RD, x_RD, grad_x = _flatten_to_rows(grad), _flatten_to_rows(x), x.new_empty(x.shape)
    options, sums_PD = _block(x.shape[-1], x.dtype), _empty_weight_sums(x, weight_grad)
    if R := len(x_RD):
        _rms_norm_backward[(_backward_programs(x),)](
            grad_RD, x_RD, weight_D.contiguous(), grad_x, sums_PD, R, grad_RD.stride(0), x_RD.stride(0),
            EPS=eps, WEIGHT_GRAD=weight_grad, **options,
        )  # fmt: skip
    return grad_x, sums_PD


@rms_norm_backward.register_fake
def _(grad, x, weight_D, eps, weight_grad):
    return x.new_empty(x.shape), _empty_weight_sums(x, weight_grad)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return rms_norm_forward(x, weight_D, eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight_D = ctx.saved_tensors
        wanted = wants_gradient(ctx, 1)
        grad_x, sums_PD = rms_norm_backward(grad, x, weight_D, ctx.eps, wanted)
        return grad_x, sums_PD.sum(0).to(weight_D.dtype) if wanted else None, None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dim, in x's dtype. Differentiable."""
    return apply_function(_RMSNorm, x, as_non_leaf(weight_D), eps)
