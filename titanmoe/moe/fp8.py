"""The experts' products in 8 bits: `[moe] expert_dtype = "fp8"`.

Both factors are e4m3 with a float32 scale per row: of tokens, of gradients, or of a weight along the summed width,

    q = round(x / s),  s = max|x| over the row / 448        y = (q_x q_w^T) s_x s_w

so forward and the gradient of the inputs are such products; the latter quantises weights along the other width. The
gradient of the weights sums over tokens, which have different scales, and is not computed in 8 bits. Router, norms,
attention and head never use 8 bits.

`scaled_rows` is the product on hardware that has it, `plain_scaled_rows` the formula: the same quantised numbers,
scaled back and multiplied in float32. It is the reference, and what "fp8_emulated" runs.

Shapes: R routed rows sorted by local expert, e local experts, D and F the widths of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe.ops import device
from titanmoe.ops.split_backward import gradient_wanted, with_own_node

LARGEST = 448.0
"""The largest number of e4m3."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 numbers and a scale per row; their product is about x. A row of zeros stays a row of zeros."""
    wide = x.to(torch.float32)
    scale = wide.abs().amax(-1) / LARGEST
    scale = scale.where(scale > 0, 1.0)
    # The division may round to more than the largest number, which becomes NaN in e4m3.
    q = (wide / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q.contiguous(), scale.contiguous()  # the hardware's product needs it, also for a transposed weight


def scaled_rows(x: tuple[Tensor, Tensor], w_eFD: Tensor, count_e: Tensor, dtype: torch.dtype) -> Tensor:
    """The quantised rows of expert i times its transposed matrix."""
    (q_RD, scale_R), (q_eFD, scale_eF) = x, quantise(w_eFD)
    ends = count_e.cumsum(0).to(torch.int32)
    return torch._scaled_grouped_mm(
        q_RD, q_eFD.transpose(1, 2), scale_R, scale_eF, offs=ends, out_dtype=dtype, use_fast_accum=True
    )


def plain_scaled_rows(x: tuple[Tensor, Tensor], w_eFD: Tensor, count_e: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by the formula."""
    (q_RD, scale_R), (q_eFD, scale_eF) = x, quantise(w_eFD)
    rows = (q_RD.to(torch.float32) * scale_R.unsqueeze(1)).split(count_e.tolist())
    weights = q_eFD.to(torch.float32) * scale_eF.unsqueeze(2)
    return torch.cat([x @ w.t() for x, w in zip(rows, weights.unbind(), strict=True)]).to(dtype)


def scaled_product(x_RD: Tensor, w_eFD: Tensor, count_e: Tensor, emulated: bool) -> Tensor:
    """One product, without gradients."""
    product = plain_scaled_rows if emulated else scaled_rows
    return product(quantise(x_RD), w_eFD, count_e, x_RD.dtype)


class _ScaledProducts(torch.autograd.Function):
    """Products of the same rows with several weights; the rows are quantised once."""

    @staticmethod
    def forward(ctx, x_RD, count_e, emulated, gradient, *weights):
        ctx.save_for_backward(x_RD, count_e, *weights)
        ctx.emulated, ctx.gradient = emulated, gradient
        product, rows = plain_scaled_rows if emulated else scaled_rows, quantise(x_RD)
        return tuple(product(rows, w, count_e, x_RD.dtype) for w in weights)

    @staticmethod
    def backward(ctx, *grads):
        x_RD, count_e, *weights = ctx.saved_tensors
        grad_x, grad_weights = None, [None] * len(weights)
        grads = [grad.contiguous() for grad in grads]
        if gradient_wanted(ctx, 0):
            parts = [
                scaled_product(g, w.transpose(1, 2), count_e, ctx.emulated) for g, w in zip(grads, weights, strict=True)
            ]
            grad_x = sum(parts[1:], parts[0])
        if gradient_wanted(ctx, 2):  # its index among the inputs that are tensors
            grad_weights = [ctx.gradient(g, x_RD, count_e) for g in grads]
        return grad_x, None, None, None, *grad_weights


def scaled_products(x_RD: Tensor, count_e: Tensor, emulated: bool, gradient, *weights: Tensor) -> tuple[Tensor, ...]:
    """Rows of expert i times each of its matrices. `gradient` computes that of the weights, not in 8 bits."""
    return _ScaledProducts.apply(with_own_node(x_RD), count_e, emulated, gradient, *map(with_own_node, weights))


def missing(on_gpu: bool) -> str:
    """Why this machine cannot compute products in 8 bits; "" if it can."""
    if not on_gpu:
        return "the run is on CPUs, which have none"
    if not hasattr(torch, "_scaled_grouped_mm"):
        return f"PyTorch {torch.__version__} has no torch._scaled_grouped_mm"
    capability = device.capability()
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, not Hopper's 9.0"
    return ""
