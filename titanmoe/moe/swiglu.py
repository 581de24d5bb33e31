"""An expert's activation, and the down projection that follows it.

Shapes as in titanmoe.moe.grouped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.recomputation import again
from titanmoe.moe.fp8 import Rounded
from titanmoe.moe.grouped import Groups, grouped_gradient, groups_of, loop_gradient, product_of, total
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
) -> tuple[Tensor, ...]:
    """The value of `plain_swiglu`, and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in (gate_RF, up_RF, weight_R1)]
    with torch.enable_grad():
        h_RF = plain_swiglu(*leaves, clamped)
    return h_RF.detach(), *torch.autograd.grad(h_RF, leaves, grad_RF)


def activation(x: Tensor, clamped: bool, kernels: str) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """The functions for the down projection's input and its gradients: a kernel on GPUs, blocks of rows on CPUs, else
    the plain formula."""
    if fused(kernels, x):
        from titanmoe.ops.kernels.swiglu import weighted_swiglu, weighted_swiglu_backward

        return partial(weighted_swiglu, clamped=clamped), partial(weighted_swiglu_backward, clamped=clamped)
    plain = partial(plain_swiglu, clamped=clamped), partial(plain_swiglu_backward, clamped=clamped)
    return plain if clamped else device.way(x, plain, cpu=(rowwise.swiglu, rowwise.swiglu_backward))


def plain_down(
    gate_RF: Tensor,
    up_RF: Tensor,
    weight_R1: Tensor,
    weights: tuple[Tensor, ...],
    count: Tensor | Groups,
    grouped: bool,
    clamped: bool,
    even: bool = False,
) -> tuple[Tensor, ...]:
    product, h_RF = product_of(grouped, "compute", even), plain_swiglu(gate_RF, up_RF, weight_R1, clamped)
    return tuple(product(h_RF, w, count) for w in weights)


class _Down(torch.autograd.Function):
    """plain_down that saves only its inputs: 2F numbers per row instead of 5F. Backward recomputes the activation.

    Where all this is computed again, nothing uses the first product, the experts' output: its memory is left as it is.
    """

    @staticmethod
    def forward(ctx, gate_RF, up_RF, weight_R1, groups, grouped, clamped, kernels, rounded, again, *weights):
        ctx.save_for_backward(gate_RF, up_RF, weight_R1, *weights)
        ctx.groups, ctx.grouped, ctx.clamped, ctx.kernels, ctx.rounded = groups, grouped, clamped, kernels, rounded
        make, _ = activation(gate_RF, clamped, kernels)
        product = product_of(grouped, rounded.dtype, kernels=kernels)
        unused = [gate_RF.new_empty(gate_RF.shape[0], weights[0].shape[1])] if again else []
        needed = list(enumerate(weights))[len(unused) :]
        h_RF = make(gate_RF, up_RF, weight_R1) if needed else None
        return *unused, *(product(h_RF, rounded(_name(i), w), groups) for i, w in needed)

    @staticmethod
    def backward(ctx, *grads_out):
        gate_RF, up_RF, weight_R1, *weights = ctx.saved_tensors
        # The routing weights may have a gradient where the rows have none: where nothing before the router is trained.
        inputs = any(gradient_wanted(ctx, i) for i in range(3))
        grads_out = [grad.contiguous() for grad in grads_out]
        product = product_of(ctx.grouped, ctx.rounded.dtype, kernels=ctx.kernels)
        gradient = grouped_gradient if ctx.grouped else loop_gradient
        make, differentiate = activation(gate_RF, ctx.clamped, ctx.kernels)
        grads, arguments = (None, None, None), (gate_RF, up_RF, weight_R1)
        if inputs:
            across = [ctx.rounded(f"{_name(i)}, across", w.transpose(1, 2)) for i, w in enumerate(weights)]
            products = (product(g, w, ctx.groups) for g, w in zip(grads_out, across, strict=True))
            h_RF, *grads = differentiate(total(products), *arguments)
        else:
            h_RF = make(*arguments)
        wanted = [gradient_wanted(ctx, 3 + i) for i in range(len(weights))]
        grad_weights = [gradient(g, h_RF, ctx.groups) if w else None for g, w in zip(grads_out, wanted, strict=True)]
        return *grads, None, None, None, None, None, None, *grad_weights


def _name(number: int) -> str:
    """Of a weight, for its 8-bit copies."""
    return f"down {number}" if number else "down"


def down(
    gate_RF: Tensor,
    up_RF: Tensor,
    weight_R1: Tensor,
    weights: tuple[Tensor, ...],
    count: Tensor | Groups,
    grouped: bool,
    clamped: bool,
    kernels: str = "auto",
    rounded: Rounded | None = None,
    even: bool = False,
) -> tuple[Tensor, ...]:
    """The products of the activation with each of the weights."""
    if torch.compiler.is_compiling():  # the compiler fuses, and chooses what to save
        return plain_down(gate_RF, up_RF, weight_R1, weights, count, grouped, clamped, even)
    how = groups_of(count), grouped, clamped, kernels, rounded or Rounded(), again()
    return _Down.apply(gate_RF, up_RF, weight_R1, *how, *map(with_own_node, weights))
