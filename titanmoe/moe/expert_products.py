"""The matrix products of a rank's experts: of the routed tokens of one call with the weights for gate, up and down.

`Experts` makes one object for each call, which says how the call multiplies:

    ExpertProducts      in the tokens' dtype, with a backward of its own that saves little
    TracedProducts      the same, where torch.compile traces the call (titanmoe.moe.traced_products)
    EightBitProducts    with factors in 8 bits (titanmoe.moe.fp8)

Biases are added by the experts themselves (titanmoe.moe.experts).

Shapes as in titanmoe.moe.grouped_mm. `hidden` is gate and up, (R, F) each, or both side by side, (R, 2F).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.recomputation import recomputing
from titanmoe.moe.grouped_mm import (
    Groups,
    even_gradient,
    even_product,
    grouped_gradient,
    grouped_product,
    loop_gradient,
    loop_product,
)
from titanmoe.ops.kernels import fused
from titanmoe.ops.split_backward import as_non_leaf, wants_gradient

Kind = Literal["grouped", "even", "loop"]
"""How tokens are multiplied by their experts' weights.

"grouped" is torch's grouped product; "even" a batched product, if all experts have as many tokens; "loop" one expert
after the other, for which the host has to know the numbers of their tokens.
"""
PRODUCTS = {"grouped": grouped_product, "even": even_product, "loop": loop_product}
GRADIENTS = {"grouped": grouped_gradient, "even": even_gradient, "loop": loop_gradient}


@dataclass(eq=False, kw_only=True)
class ExpertProducts:
    """How one call of the experts multiplies its routed tokens, sorted by expert, by the experts' weights."""

    groups: Groups
    kind: Kind
    clamped: bool = False
    """Whether the activation is gpt-oss's clamped SwiGLU."""
    kernels: str = "auto"

    @property
    def grouped(self) -> bool:
        """Whether torch's grouped product multiplies."""
        return self.kind == "grouped"

    # ---- differentiable

    def up(self, x_RD: Tensor, *weights: Tensor, sums: Sequence[AddGradient | None] = ()) -> tuple[Tensor, ...]:
        """Return the products of the tokens with each of the weights (e, F, D): (R, F) each. Differentiable.

        Args:
            sums: for the first of the weights, what adds the gradient to a sum, if autograd does not get it.
        """
        return _Up.apply(as_non_leaf(x_RD), self, sums, *map(as_non_leaf, weights))

    def down(
        self, hidden: tuple[Tensor, ...], weight_R1: Tensor, *weights: Tensor, add: AddGradient | None = None
    ) -> tuple[Tensor, ...]:
        """Return the products of the activation times the routing weight with each of the weights (e, D, F).

        Differentiable.

        Args:
            add: adds the gradient of the first of the weights to a sum, if autograd does not get it.
        """
        return _Down.apply(self, add, recomputing(), len(hidden), *hidden, weight_R1, *map(as_non_leaf, weights))

    # ---- not differentiable: the factors of a product, the product, and the gradient of a weight

    def token_factor(self, x_RD: Tensor) -> Any:
        """Return the tokens in the form that `product` takes."""
        return x_RD

    def weight_factor(self, name: str, w_eFD: Tensor) -> Any:
        """Return a weight in the form that `product` takes.

        Args:
            name: identifies the weight, and the width along which it is multiplied, within the layer.
        """
        return w_eFD

    def product(self, x_RD: Any, w_eFD: Any) -> Tensor:
        """Return the product of each token with its expert's transposed weight. Not differentiable."""
        return PRODUCTS[self.kind](x_RD, w_eFD, self.groups)

    def weight_gradient(self, grad_RD: Tensor, h_RF: Tensor, add: AddGradient | None) -> Tensor | None:
        """Return the gradient of a weight, (e, D, F); None if it has been added to a sum."""
        if add is not None:
            return add(grad_RD, h_RF, self)
        return GRADIENTS[self.kind](grad_RD, h_RF, self.groups)


AddGradient = Callable[[Tensor, Tensor, ExpertProducts], None]
"""Adds the gradient of a weight to its sum over microbatches. Arguments as of `ExpertProducts.weight_gradient`."""


class _Up(torch.autograd.Function):
    """The products of one set of tokens with several weights; the tokens are converted to a factor once."""

    @staticmethod
    def forward(ctx, x_RD, how, sums, *weights):
        ctx.save_for_backward(x_RD if any(ctx.needs_input_grad[-len(weights) :]) else None, *weights)
        ctx.how, ctx.sums = how, sums
        return tuple(multiply(how, "up", x_RD, weights))

    @staticmethod
    def backward(ctx, *grads):
        x_RD, *weights = ctx.saved_tensors
        wanted = [wants_gradient(ctx, i) for i in range(1 + len(weights))]  # of the inputs that are tensors
        grad_x, grad_weights = up_backward(ctx.how, grads, x_RD, weights, wanted, ctx.sums)
        return grad_x, None, None, *grad_weights


class _Down(torch.autograd.Function):
    """The down projection, which saves only its inputs: 2F numbers per token instead of the formula's 5F.

    Backward recomputes the activation. While backward recomputes the layer, nothing uses the first product, the
    experts' output: its memory is not written.
    """

    @staticmethod
    def forward(ctx, how, add, recomputes, parts, *tensors):
        # tensors: the parts of hidden, weight_R1, weights
        hidden, weight_R1, weights = tensors[:parts], tensors[parts], tensors[parts + 1 :]
        ctx.save_for_backward(*tensors)
        ctx.how, ctx.add, ctx.parts = how, add, parts
        if not recomputes:
            return tuple(multiply(how, "down", activate(how, hidden, weight_R1), weights))
        unused = hidden[0].new_empty(hidden[0].shape[0], weights[0].shape[1])
        needed = weights[1:]
        return unused, *(multiply(how, "down", activate(how, hidden, weight_R1), needed, 1) if needed else ())

    @staticmethod
    def backward(ctx, *grads):
        tensors, parts = ctx.saved_tensors, ctx.parts
        hidden, weight_R1, weights = tensors[:parts], tensors[parts], tensors[parts + 1 :]
        # The routing weights may have a gradient where the rows have none: where nothing before the router is trained.
        inputs = any(wants_gradient(ctx, i) for i in range(parts + 1))
        wanted = [inputs, *(wants_gradient(ctx, parts + 1 + i) for i in range(len(weights)))]
        grad_both, grad_R1, grad_weights = down_backward(ctx.how, grads, hidden, weight_R1, weights, wanted, ctx.add)
        grad_hidden = [None] * parts if grad_both is None else grad_both.chunk(parts, 1)
        return None, None, None, None, *grad_hidden, grad_R1, *grad_weights


# ---- the formulas, not differentiable


def multiply(how: ExpertProducts, name: str, x_RD: Tensor, weights: Sequence[Tensor], first: int = 0) -> list[Tensor]:
    """Return the product of the tokens with each of the weights, which are numbered from `first`.

    Not differentiable.
    """
    rows = how.token_factor(x_RD)
    return [how.product(rows, how.weight_factor(f"{name} {i}", w)) for i, w in enumerate(weights, first)]


def activate(how: ExpertProducts, hidden: Sequence[Tensor], weight_R1: Tensor) -> Tensor:
    """Return the input of the down projection: act(gate) * up * routing weight. Not differentiable."""
    gate_RF, up_RF = gate_and_up(hidden)
    make, _ = activation(gate_RF, how.clamped, how.kernels)
    return make(gate_RF, up_RF, weight_R1)


def up_backward(
    how: ExpertProducts,
    grads: Sequence[Tensor],
    x_RD: Tensor | None,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    sums: Sequence[AddGradient | None] = (),
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of the tokens and of each weight; None for those that `wanted` leaves out.

    Args:
        wanted: whether each is wanted, of the tokens first, then of each weight.
    """
    grads = [grad if grad.stride(1) == 1 and grad.stride(0) else grad.contiguous() for grad in grads]
    grad_x = _through(how, "up", grads, weights) if wanted[0] else None
    adders = [*sums, *[None] * (len(weights) - len(sums))]
    each = zip(grads, adders, wanted[1:], strict=True)
    return grad_x, [how.weight_gradient(grad, x_RD, add) if wants else None for grad, add, wants in each]


def down_backward(
    how: ExpertProducts,
    grads: Sequence[Tensor],
    hidden: Sequence[Tensor],
    weight_R1: Tensor,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    add: AddGradient | None = None,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Return the gradients of gate and up, side by side, of the routing weights, and of each weight.

    Args:
        wanted: whether they are wanted, the first two together, then of each weight. Others are None.
    """
    arguments = *gate_and_up(hidden), weight_R1
    grads = [grad.contiguous() for grad in grads]
    make, differentiate = activation(arguments[0], how.clamped, how.kernels)
    grad_both = grad_R1 = None
    if wanted[0]:
        h_RF, grad_both, grad_R1 = differentiate(_through(how, "down", grads, weights), *arguments)
    else:
        h_RF = make(*arguments)
    each = enumerate(zip(grads, wanted[1:], strict=True))
    return grad_both, grad_R1, [how.weight_gradient(g, h_RF, None if i else add) if w else None for i, (g, w) in each]


def _through(how: ExpertProducts, name: str, grads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the tokens that were multiplied by all of the weights."""
    across = [how.weight_factor(f"{name} {i}, across", w.transpose(1, 2)) for i, w in enumerate(weights)]
    return _total(how.product(how.token_factor(g), w) for g, w in zip(grads, across, strict=True))


def _total(summands: Iterator[Tensor]) -> Tensor:
    """Return the sum of tensors. Two of them exist at a time."""
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
    """Return the down projection's input, act(gate) * up * weight, by plain operations: the kernel's reference.

    The routing weight is applied here, so that backward needs no expert's output.
    """
    gate, up = gate_RF.to(weight_R1.dtype), up_RF.to(weight_R1.dtype)
    h_RF = clamped_swiglu(gate, up) if clamped else F.silu(gate) * up
    return (h_RF * weight_R1).to(gate_RF.dtype)


def plain_swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the value of `plain_swiglu`, the gradients of gate and up side by side, and that of the routing weight."""
    gate, up, grad = (x.to(weight_R1.dtype) for x in (gate_RF, up_RF, grad_RF))
    grad_h = grad * weight_R1
    if clamped:
        low = gate.masked_fill(gate > 7.0, 7.0)
        gated = torch.sigmoid(1.702 * low)
        act, factor = low * gated, up.masked_fill(up > 7.0, 7.0).masked_fill(up < -7.0, -7.0) + 1
        grad_gate = (grad_h * factor * (gated + 1.702 * act * (1 - gated))).masked_fill(gate > 7.0, 0)
        grad_up = (grad_h * act).masked_fill((up > 7.0) | (up < -7.0), 0)
    else:
        act, factor = F.silu(gate), up
        grad_gate, grad_up = torch.ops.aten.silu_backward(grad_h * factor, gate), grad_h * act
    h_RF = act * factor
    grad_both_RF = torch.cat([grad.to(gate_RF.dtype) for grad in (grad_gate, grad_up)], 1)
    return (h_RF * weight_R1).to(gate_RF.dtype), grad_both_RF, (grad * h_RF).sum(1, keepdim=True)


def gate_and_up(hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return gate and up, (R, F) each."""
    return hidden if len(hidden) == 2 else hidden[0].chunk(2, 1)


def activation(x: Tensor, clamped: bool, kernels: str) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """Return the functions for the down projection's input and its gradients: kernels on GPUs, else plain formulas."""
    if fused(kernels, x):
        from titanmoe.ops.kernels.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward

        return partial(weighted_swiglu, clamped=clamped), partial(weighted_swiglu_backward, clamped=clamped)
    return partial(plain_swiglu, clamped=clamped), partial(plain_swiglu_backward, clamped=clamped)
