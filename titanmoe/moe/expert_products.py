"""The products of a rank's experts: of one call's routed tokens with the matrices for gate, up and down.

Experts make one object for each call, which says how the call multiplies:

    ExpertProducts      in the tokens' dtype, with a backward of its own that saves little
    TracedProducts      where torch.compile traces the call: plain formulas, of which the compiler chooses what to save
    EightBitProducts    with factors in 8 bits (titanmoe.moe.fp8)

Biases are added by the experts themselves (titanmoe.moe.experts).

Shapes as in titanmoe.moe.grouped. `hidden` is gate and up, (R, F) each, or both side by side, (R, 2F).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.recomputation import recomputing
from titanmoe.moe.grouped import Groups, even_product, grouped_gradient, grouped_loop, grouped_product, loop_gradient
from titanmoe.ops.kernels import fused
from titanmoe.ops.split_backward import gradient_wanted, with_own_node


@dataclass(eq=False, kw_only=True)
class ExpertProducts:
    """How one call of the experts multiplies its routed tokens, sorted by expert, by the experts' matrices."""

    groups: Groups
    grouped: bool
    """Whether torch's grouped product computes them, else a loop over experts."""
    clamped: bool = False
    """Whether the activation is gpt-oss's."""
    kernels: str = "auto"

    # ---- differentiable

    def up(self, x_RD: Tensor, *weights: Tensor, sums: Sequence[AddGradient | None] = ()) -> tuple[Tensor, ...]:
        """Return the product of the tokens with each of the weights, (e, F, D).

        Args:
            sums: for the first of the weights, what adds the gradient to a sum, if autograd does not get it.
        """
        return _Up.apply(with_own_node(x_RD), self, sums, *map(with_own_node, weights))

    def down(
        self, hidden: tuple[Tensor, ...], weight_R1: Tensor, *weights: Tensor, add: AddGradient | None = None
    ) -> tuple[Tensor, ...]:
        """Return the product of each of the weights, (e, D, F), with the activation times the routing weight.

        Args:
            add: adds the gradient of the first of the weights to a sum, if autograd does not get it.
        """
        return _Down.apply(self, add, recomputing(), len(hidden), *hidden, weight_R1, *map(with_own_node, weights))

    # ---- not differentiable: the factors of a product, the product, and the gradient of a weight

    def rows(self, x_RD: Tensor) -> Any:
        """Return the rows as a factor of any number of products."""
        return x_RD

    def weight(self, name: str, w_eFD: Tensor) -> Any:
        """Return a weight as a factor. `name` identifies it, along this width, within the layer."""
        return w_eFD

    def product(self, x_RD: Any, w_eFD: Any) -> Tensor:
        return (grouped_product if self.grouped else grouped_loop)(x_RD, w_eFD, self.groups)

    def weight_gradient(self, grad_RD: Tensor, h_RF: Tensor, add: AddGradient | None) -> Tensor | None:
        """Return the gradient of a weight, (e, D, F); None if it has been added to a sum."""
        if add is not None:
            return add(grad_RD, h_RF, self)
        return (grouped_gradient if self.grouped else loop_gradient)(grad_RD, h_RF, self.groups)


AddGradient = Callable[[Tensor, Tensor, ExpertProducts], None]
"""Adds the gradient of a weight to its sum over microbatches. Arguments as of `ExpertProducts.weight_gradient`."""


@dataclass(eq=False, kw_only=True)
class TracedProducts(ExpertProducts):
    """Products by plain formulas, which autograd or a compiler differentiates."""

    groups: Groups | Tensor
    """Code that is traced gets the counts, (e,)."""
    even: bool = False
    """Whether all experts have the same number of rows."""

    def up(self, x_RD: Tensor, *weights: Tensor, sums: Sequence[AddGradient | None] = ()) -> tuple[Tensor, ...]:
        return tuple(self.product(x_RD, w) for w in weights)

    def down(
        self, hidden: tuple[Tensor, ...], weight_R1: Tensor, *weights: Tensor, add: AddGradient | None = None
    ) -> tuple[Tensor, ...]:
        h_RF = plain_swiglu(*gate_and_up(hidden), weight_R1, self.clamped)
        return tuple(self.product(h_RF, w) for w in weights)

    def product(self, x_RD: Tensor, w_eFD: Tensor) -> Tensor:
        return even_product(x_RD, w_eFD, self.groups) if self.even else super().product(x_RD, w_eFD)


class _Up(torch.autograd.Function):
    """Products of the same rows with several weights, for which the rows become a factor once."""

    @staticmethod
    def forward(ctx, x_RD, how, sums, *weights):
        ctx.save_for_backward(x_RD if any(ctx.needs_input_grad[-len(weights) :]) else None, *weights)
        ctx.how, ctx.sums = how, sums
        rows = how.rows(x_RD)
        return tuple(how.product(rows, how.weight(f"up {i}", w)) for i, w in enumerate(weights))

    @staticmethod
    def backward(ctx, *grads):
        x_RD, *weights = ctx.saved_tensors
        how, grad_x, grad_weights = ctx.how, None, [None] * len(weights)
        grads = [grad if grad.stride(1) == 1 and grad.stride(0) else grad.contiguous() for grad in grads]
        if gradient_wanted(ctx, 0):
            grad_x = _through(how, "up", grads, weights)
        for i, grad in enumerate(grads):
            if gradient_wanted(ctx, 1 + i):  # its index among the inputs that are tensors
                add = ctx.sums[i] if i < len(ctx.sums) else None
                grad_weights[i] = how.weight_gradient(grad, x_RD, add)
        return grad_x, None, None, *grad_weights


class _Down(torch.autograd.Function):
    """The down projection that saves only its inputs: 2F numbers per row instead of the formula's 5F. Backward
    recomputes the activation.

    While backward recomputes it, nothing uses the first product, the experts' output: its memory is not written.
    """

    @staticmethod
    def forward(ctx, how, add, recomputes, parts, *tensors):
        # tensors: the parts of hidden, weight_R1, weights
        (gate_RF, up_RF), weight_R1, weights = gate_and_up(tensors[:parts]), tensors[parts], tensors[parts + 1 :]
        ctx.save_for_backward(*tensors)
        ctx.how, ctx.add, ctx.parts = how, add, parts
        make, _ = activation(gate_RF, how.clamped, how.kernels)
        unused = [gate_RF.new_empty(gate_RF.shape[0], weights[0].shape[1])] if recomputes else []
        needed = list(enumerate(weights))[len(unused) :]
        rows = how.rows(make(gate_RF, up_RF, weight_R1)) if needed else None
        return *unused, *(how.product(rows, how.weight(f"down {i}", w)) for i, w in needed)

    @staticmethod
    def backward(ctx, *grads_out):
        how, tensors, parts = ctx.how, ctx.saved_tensors, ctx.parts
        arguments, weights = (*gate_and_up(tensors[:parts]), tensors[parts]), tensors[parts + 1 :]
        # The routing weights may have a gradient where the rows have none: where nothing before the router is trained.
        inputs = any(gradient_wanted(ctx, i) for i in range(parts + 1))
        grads_out = [grad.contiguous() for grad in grads_out]
        make, differentiate = activation(arguments[0], how.clamped, how.kernels)
        grad_hidden, grad_R1 = [None] * parts, None
        if inputs:
            h_RF, grad_both, grad_R1 = differentiate(_through(how, "down", grads_out, weights), *arguments)
            grad_hidden = grad_both.chunk(parts, 1)
        else:
            h_RF = make(*arguments)
        grad_weights = [None] * len(weights)
        for i, grad in enumerate(grads_out):
            if gradient_wanted(ctx, parts + 1 + i):
                grad_weights[i] = how.weight_gradient(grad, h_RF, None if i else ctx.add)
        return None, None, None, None, *grad_hidden, grad_R1, *grad_weights


def _through(how: ExpertProducts, name: str, grads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the rows that were multiplied by all of the weights."""
    across = [how.weight(f"{name} {i}, across", w.transpose(1, 2)) for i, w in enumerate(weights)]
    return _total(how.product(how.rows(g), w) for g, w in zip(grads, across, strict=True))


def _total(summands: Iterator[Tensor]) -> Tensor:
    """Return their sum. Two of them exist at a time."""
    out = next(summands)
    for summand in summands:
        out += summand
    return out


# ---- the activation between them


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gpt-oss's activation: the gate is at most 7, the up projection within 7 of 0 and then shifted by 1.

    A bound itself, which 16-bit numbers often are, passes its gradient. That of `clamp` does so until torch 2.13 only
    (github.com/pytorch/pytorch/issues/195931).
    """
    gate, up = gate.masked_fill(gate > 7.0, 7.0), up.masked_fill(up > 7.0, 7.0).masked_fill(up < -7.0, -7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def plain_swiglu(gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool) -> Tensor:
    """Return the down projection's input. The routing weight is applied here, so that backward needs no expert's
    output."""
    gate, up = gate_RF.to(weight_R1.dtype), up_RF.to(weight_R1.dtype)
    h_RF = clamped_swiglu(gate, up) if clamped else F.silu(gate) * up
    return (h_RF * weight_R1).to(gate_RF.dtype)


def plain_swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the value of `plain_swiglu`; the gradients of gate and up, side by side; and that of the weight."""
    leaves = [x.detach().requires_grad_() for x in (gate_RF, up_RF, weight_R1)]
    with torch.enable_grad():
        h_RF = plain_swiglu(*leaves, clamped)
    *halves, weight = torch.autograd.grad(h_RF, leaves, grad_RF)
    return h_RF.detach(), torch.cat(halves, 1), weight


def gate_and_up(hidden: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return gate and up, (R, F) each."""
    return hidden if len(hidden) == 2 else hidden[0].chunk(2, 1)


def activation(x: Tensor, clamped: bool, kernels: str) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """Return the functions for the down projection's input and for gradients: a kernel on GPUs, else the plain
    formula."""
    if fused(kernels, x):
        from titanmoe.ops.kernels.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward

        return partial(weighted_swiglu, clamped=clamped), partial(weighted_swiglu_backward, clamped=clamped)
    return partial(plain_swiglu, clamped=clamped), partial(plain_swiglu_backward, clamped=clamped)
