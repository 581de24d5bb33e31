"""An expert's activation, and the down projection that follows it.

`hidden` is gate and up, (R, F) each, or both side by side, (R, 2F). Shapes as in titanmoe.moe.grouped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.recomputation import again
from titanmoe.moe.fp8 import Rounded
from titanmoe.moe.grouped import AddGradient, Groups, groups_of, product_of, total, weight_gradient
from titanmoe.ops import device
from titanmoe.ops.cpu import rowwise
from titanmoe.ops.kernels import fused
from titanmoe.ops.split_backward import gradient_wanted, with_own_node


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's activation: the gate is at most 7, the up projection within 7 of 0 and then shifted by 1.

    A bound itself, which 16-bit numbers often are, passes its gradient. That of `clamp` does so until torch 2.13 only
    (github.com/pytorch/pytorch/issues/195931).
    """
    gate, up = gate.masked_fill(gate > 7.0, 7.0), up.masked_fill(up > 7.0, 7.0).masked_fill(up < -7.0, -7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def plain_swiglu(gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool) -> Tensor:
    """The down projection's input. The routing weight is applied here, so that backward needs no expert's output."""
    gate, up = gate_RF.to(weight_R1.dtype), up_RF.to(weight_R1.dtype)
    h_RF = clamped_swiglu(gate, up) if clamped else F.silu(gate) * up
    return (h_RF * weight_R1).to(gate_RF.dtype)


def plain_swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The value of `plain_swiglu`; the gradients of gate and up, side by side; and that of the weight."""
    leaves = [x.detach().requires_grad_() for x in (gate_RF, up_RF, weight_R1)]
    with torch.enable_grad():
        h_RF = plain_swiglu(*leaves, clamped)
    *halves, weight = torch.autograd.grad(h_RF, leaves, grad_RF)
    return h_RF.detach(), torch.cat(halves, 1), weight


def gate_and_up(hidden: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return hidden if len(hidden) == 2 else hidden[0].chunk(2, 1)


def activation(x: Tensor, clamped: bool, kernels: str) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """The functions for the down projection's input and for gradients: a kernel on GPUs, blocks of rows on CPUs, else
    the plain formula."""
    if fused(kernels, x):
        from titanmoe.ops.kernels.swiglu import weighted_swiglu, weighted_swiglu_backward

        return partial(weighted_swiglu, clamped=clamped), partial(weighted_swiglu_backward, clamped=clamped)
    plain = partial(plain_swiglu, clamped=clamped), partial(plain_swiglu_backward, clamped=clamped)
    return plain if clamped else device.way(x, plain, cpu=(rowwise.swiglu, rowwise.swiglu_backward))


def plain_down(
    hidden: tuple[Tensor, ...],
    weight_R1: Tensor,
    weights: tuple[Tensor, ...],
    count: Tensor | Groups,
    grouped: bool,
    clamped: bool,
    even: bool = False,
) -> tuple[Tensor, ...]:
    product, h_RF = product_of(grouped, "compute", even), plain_swiglu(*gate_and_up(hidden), weight_R1, clamped)
    return tuple(product(h_RF, w, count) for w in weights)


class _Down(torch.autograd.Function):
    """plain_down that saves only its inputs: 2F numbers per row instead of 5F. Backward recomputes the activation.

    Where all this is computed again, nothing uses the first product, the experts' output: its memory is left as it is.
    """

    @staticmethod
    def forward(ctx, groups, grouped, clamped, kernels, rounded, add, again, parts, *tensors):
        """tensors: the parts of hidden, weight_R1, weights."""
        (gate_RF, up_RF), weight_R1, weights = gate_and_up(tensors[:parts]), tensors[parts], tensors[parts + 1 :]
        ctx.save_for_backward(*tensors)
        ctx.groups, ctx.grouped, ctx.clamped, ctx.kernels, ctx.rounded = groups, grouped, clamped, kernels, rounded
        ctx.parts, ctx.add = parts, add
        make, _ = activation(gate_RF, clamped, kernels)
        product = product_of(grouped, rounded.dtype, kernels=kernels)
        unused = [gate_RF.new_empty(gate_RF.shape[0], weights[0].shape[1])] if again else []
        needed = list(enumerate(weights))[len(unused) :]
        h_RF = make(gate_RF, up_RF, weight_R1) if needed else None
        return *unused, *(product(h_RF, rounded(_name(i), w), groups) for i, w in needed)

    @staticmethod
    def backward(ctx, *grads_out):
        tensors, parts = ctx.saved_tensors, ctx.parts
        arguments, weights = (*gate_and_up(tensors[:parts]), tensors[parts]), tensors[parts + 1 :]
        # The routing weights may have a gradient where the rows have none: where nothing before the router is trained.
        inputs = any(gradient_wanted(ctx, i) for i in range(parts + 1))
        grads_out = [grad.contiguous() for grad in grads_out]
        product = product_of(ctx.grouped, ctx.rounded.dtype, kernels=ctx.kernels)
        make, differentiate = activation(arguments[0], ctx.clamped, ctx.kernels)
        grad_hidden, grad_R1 = [None] * parts, None
        if inputs:
            across = [ctx.rounded(f"{_name(i)}, across", w.transpose(1, 2)) for i, w in enumerate(weights)]
            products = (product(g, w, ctx.groups) for g, w in zip(grads_out, across, strict=True))
            h_RF, grad_both, grad_R1 = differentiate(total(products), *arguments)
            grad_hidden = grad_both.chunk(parts, 1)
        else:
            h_RF = make(*arguments)
        grad_weights = [None] * len(weights)
        for i, grad in enumerate(grads_out):
            if gradient_wanted(ctx, parts + 1 + i):
                add = None if i else ctx.add
                grad_weights[i] = weight_gradient(grad, h_RF, ctx.groups, ctx.grouped, ctx.kernels, add)
        return None, None, None, None, None, None, None, None, *grad_hidden, grad_R1, *grad_weights


def _name(number: int) -> str:
    """Of a weight, for its 8-bit copies."""
    return f"down {number}" if number else "down"


def down(
    hidden: tuple[Tensor, ...],
    weight_R1: Tensor,
    weights: tuple[Tensor, ...],
    count: Tensor | Groups,
    grouped: bool,
    clamped: bool,
    kernels: str = "auto",
    rounded: Rounded | None = None,
    even: bool = False,
    add: AddGradient | None = None,
) -> tuple[Tensor, ...]:
    """The products of the activation with each of the weights. add: where the gradient of the first goes instead."""
    if torch.compiler.is_compiling():  # the compiler fuses, and chooses what to save
        return plain_down(hidden, weight_R1, weights, count, grouped, clamped, even)
    how = groups_of(count), grouped, clamped, kernels, rounded or Rounded(), add, again(), len(hidden)
    return _Down.apply(*how, *hidden, weight_R1, *map(with_own_node, weights))
