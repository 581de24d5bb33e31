"""The matrix products of a rank's experts: of the routed tokens of one call with the weights for gate, up and down.

`Experts` makes one object for each call, which says how the call multiplies: `ExpertProducts` in the tokens' dtype,
`TracedProducts` where torch.compile traces the call (titanmoe.moe.traced_products), `EightBitProducts` with factors in
8 bits (titanmoe.moe.fp8). Functions that get it as `products` multiply as it says.

Shapes: R routed tokens sorted by local expert, e local experts, D model, F this rank's hidden width of an expert.
`hidden` is gate and up, (R, F) each, or one tensor with both side by side, (R, 2F). `weight_R1` are routing weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

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
from titanmoe.ops.autograd_functions import apply_function, as_non_leaf, wants_gradient
from titanmoe.ops.kernels import fused

if TYPE_CHECKING:
    from titanmoe.moe.fp8 import Quantised

ProductMethod = Literal["grouped", "even", "loop"]
"""Kind of product of a rank's tokens with the weights of their experts.

"grouped" is torch's grouped product (`torch._grouped_mm`); "even" a batched product, if all experts have equally many
tokens; "loop" one product per expert, for which the host has to know how many tokens each expert has.
"""
PRODUCTS = {"grouped": grouped_product, "even": even_product, "loop": loop_product}
GRADIENTS = {"grouped": grouped_gradient, "even": even_gradient, "loop": loop_gradient}


@dataclass(eq=False, kw_only=True)
class ExpertProducts:
    """The matrix products of one call of a layer's experts: of routed tokens, sorted by expert, and weights."""

    groups: Groups
    method: ProductMethod
    clamped: bool = False
    """Whether the activation is gpt-oss's clamped SwiGLU."""
    kernels: str = "auto"
    index_R: Tensor | None = None
    """Global index of each routed token, for dropout of the experts' adapters; None without it."""

    # ---- differentiable

    def up(self, x_RD: Tensor, *weights: Tensor, sums: Sequence[AddGradient | None] = ()) -> tuple[Tensor, ...]:
        """Return the product of the tokens with each of the weights (e, F, D), one tensor (R, F) each. Differentiable.

        Args:
            x_RD: the routed tokens, sorted by expert.
            weights: the experts' weights for gate and up, or one with both side by side.
            sums: for each weight a function that adds its gradient to a sum over microbatches, so that autograd gets
                none for it, or None; () if autograd gets all gradients.
        """
        return apply_function(_Up, as_non_leaf(x_RD), self, sums, *map(as_non_leaf, weights))

    def down(
        self, hidden: tuple[Tensor, ...], weight_R1: Tensor, *weights: Tensor, add: AddGradient | None = None
    ) -> tuple[Tensor, ...]:
        """Return the product of the down projection's input with each of the weights (e, D, F), one tensor (R, D) each.

        The input is act(gate) * up * routing weight, which backward recomputes. Differentiable. While backward
        recomputes the layer, the first of the results is uninitialized memory, since nothing reads it.

        Args:
            weights: the experts' weights: w2, and perhaps an adapter's A, whose rank then stands for D.
            add: a function that adds the gradient of the first of the weights to a sum over microbatches, so that
                autograd gets none for it.
        """
        inputs = *hidden, weight_R1, *map(as_non_leaf, weights)
        return apply_function(_Down, self, add, recomputing(), len(hidden), *inputs)

    def down_input(self, hidden: tuple[Tensor, ...], weight_R1: Tensor) -> Tensor:
        """Return the down projection's input, act(gate) * up * routing weight: (R, F). Differentiable.

        Backward recomputes it, so that only its own inputs are saved.
        """
        return apply_function(_Activate, self, *gate_and_up(hidden), weight_R1)

    # ---- not differentiable: the factors of a product, the product, and the gradient of a weight

    def token_factor(self, x_RD: Tensor) -> Tensor | Quantised:
        """Convert tokens to the left operand of `product`. Here they stay as they are; a subclass quantises them."""
        return x_RD

    def weight_factor(self, name: str, w_eFD: Tensor) -> Tensor | Quantised:
        """Convert a weight to the right operand of `product`. Here it stays as it is; a subclass quantises it.

        Args:
            name: a key for caches that identifies, within the layer, the weight and the dim that the product sums over.
            w_eFD: the weight of all local experts.
        """
        return w_eFD

    def product(self, x_RD: Tensor | Quantised, w_eFD: Tensor | Quantised) -> Tensor:
        """Multiply each token by its expert's transposed weight: (R, F). Not differentiable.

        `x_RD` is from `token_factor`, `w_eFD` from `weight_factor`.
        """
        return PRODUCTS[self.method](x_RD, w_eFD, self.groups)

    def weight_gradient(self, grad_RD: Tensor, h_RF: Tensor, add: AddGradient | None) -> Tensor | None:
        """Compute the gradient of a weight (e, D, F) of a product y = h w^T.

        Args:
            grad_RD: the gradient of the product's output.
            h_RF: the product's input.
            add: called with (grad_RD, h_RF, self) instead, adds the gradient to a sum over microbatches; None without.

        Returns:
            The gradient; None if `add` has added it.
        """
        if add is not None:
            return add(grad_RD, h_RF, self)
        return GRADIENTS[self.method](grad_RD, h_RF, self.groups)


AddGradient = Callable[[Tensor, Tensor, ExpertProducts], None]
"""Function that adds the gradient of a weight to its sum over microbatches, given the gradient of
the product's output (R, .), the product's input (R, .), and the object that multiplies."""


class _Up(torch.autograd.Function):
    """The products of the same tokens with several weights, with a backward that converts operands only once."""

    @staticmethod
    def forward(ctx, x_RD, products, sums, *weights):
        ctx.save_for_backward(x_RD if any(ctx.needs_input_grad[-len(weights) :]) else None, *weights)
        ctx.products, ctx.sums = products, sums
        return tuple(multiply(products, "up", x_RD, weights))

    @staticmethod
    def backward(ctx, *grads):
        x_RD, *weights = ctx.saved_tensors
        wanted = [wants_gradient(ctx, i) for i in range(1 + len(weights))]  # of the inputs that are tensors
        grad_x, grad_weights = up_backward(ctx.products, grads, x_RD, weights, wanted, ctx.sums)
        return grad_x, None, None, *grad_weights


class _Down(torch.autograd.Function):
    """The down projection, which saves only its inputs: 2F numbers per token instead of the formula's 5F.

    Backward recomputes the activation. While backward recomputes the layer, nothing uses the product with the first
    weight, the experts' output, so a tensor of that shape is returned whose memory is not written.
    """

    @staticmethod
    def forward(ctx, products, add, recomputes, parts, *tensors):
        # tensors: the parts of hidden, weight_R1, weights
        hidden, weight_R1, weights = tensors[:parts], tensors[parts], tensors[parts + 1 :]
        ctx.save_for_backward(*tensors)
        ctx.products, ctx.add, ctx.parts = products, add, parts
        if not recomputes:
            return tuple(multiply(products, "down", activate(products, hidden, weight_R1), weights))
        unused = hidden[0].new_empty(hidden[0].shape[0], weights[0].shape[1])
        needed = weights[1:]
        return unused, *(multiply(products, "down", activate(products, hidden, weight_R1), needed, 1) if needed else ())

    @staticmethod
    def backward(ctx, *grads):
        tensors, parts = ctx.saved_tensors, ctx.parts
        hidden, weight_R1, weights = tensors[:parts], tensors[parts], tensors[parts + 1 :]
        # The routing weights may have a gradient where the rows have none: where nothing before the router is trained.
        inputs = any(wants_gradient(ctx, i) for i in range(parts + 1))
        wanted = [inputs, *(wants_gradient(ctx, parts + 1 + i) for i in range(len(weights)))]
        grad_both, grad_R1, grad_weights = down_backward(
            ctx.products, grads, hidden, weight_R1, weights, wanted=wanted, add=ctx.add
        )
        grad_hidden = [None] * parts if grad_both is None else grad_both.chunk(parts, 1)
        return None, None, None, None, *grad_hidden, grad_R1, *grad_weights


class _Activate(torch.autograd.Function):
    """The activation, which saves only its inputs, as `_Down` does; backward recomputes it."""

    @staticmethod
    def forward(ctx, products, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.products = products
        return activate(products, inputs[:2], inputs[2])

    @staticmethod
    def backward(ctx, grad_RF):
        inputs, products = ctx.saved_tensors, ctx.products
        _, differentiate = activation(inputs[0], products.clamped, products.kernels)
        _, grad_both, grad_R1 = differentiate(grad_RF.contiguous(), *inputs)
        return None, *grad_both.chunk(2, 1), grad_R1


# ---- the formulas, not differentiable


def multiply(
    products: ExpertProducts, name: str, x_RD: Tensor, weights: Sequence[Tensor], first: int = 0
) -> list[Tensor]:
    """Multiply the tokens by each of several weights of all local experts: a list of (R, F). Not differentiable.

    8-bit weights are cached under `name`, the projection, "up" or "down", and their numbers, which begin with `first`.
    """
    rows = products.token_factor(x_RD)
    return [products.product(rows, products.weight_factor(f"{name} {i}", w)) for i, w in enumerate(weights, first)]


def activate(products: ExpertProducts, hidden: Sequence[Tensor], weight_R1: Tensor) -> Tensor:
    """Compute the input of the down projection, act(gate) * up * routing weight: (R, F). Not differentiable."""
    gate_RF, up_RF = gate_and_up(hidden)
    make, _ = activation(gate_RF, products.clamped, products.kernels)
    return make(gate_RF, up_RF, weight_R1)


def up_backward(
    products: ExpertProducts,
    grads: Sequence[Tensor],
    x_RD: Tensor | None,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    sums: Sequence[AddGradient | None] = (),
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Compute the gradients of y_i = x w_i^T, the products of the same tokens with several weights (gate and up).

    Args:
        grads: the gradient of the product with each weight.
        x_RD: the tokens; None if no weight's gradient is wanted.
        weights: the weights of all local experts, (e, F, D) each.
        wanted: whether the gradient is wanted: of the tokens first, then of each weight.
        sums: for each weight a function that adds its gradient to a sum over microbatches, or None; () to return all.

    Returns:
        The gradient of the tokens, and a list with that of each weight; None for those not wanted or added to a sum.
    """
    grads = [grad if grad.stride(1) == 1 and grad.stride(0) else grad.contiguous() for grad in grads]
    grad_x = _through(products, "up", grads, weights) if wanted[0] else None
    each = zip(grads, sums or [None] * len(weights), wanted[1:], strict=True)
    return grad_x, [products.weight_gradient(grad, x_RD, add) if wants else None for grad, add, wants in each]


def down_backward(
    products: ExpertProducts,
    grads: Sequence[Tensor],
    hidden: Sequence[Tensor],
    weight_R1: Tensor,
    weights: Sequence[Tensor],
    *,
    wanted: Sequence[bool],
    add: AddGradient | None = None,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Compute the gradients of y_i = h w_i^T, with h = act(gate) * up * routing weight (the down projection).

    Args:
        grads: the gradient of the product with each weight.
        weights: the weights of all local experts, (e, D, F) each.
        wanted: whether the gradient is wanted: of `hidden` and the routing weights together first, then of each weight.
        add: a function that adds the first weight's gradient to a sum over microbatches; None to return it.

    Returns:
        The gradients of gate and up side by side (R, 2F) and of the routing weights (R, 1), and a list with that of
        each weight; None for those not wanted or added to a sum.
    """
    arguments = *gate_and_up(hidden), weight_R1
    grads = [grad.contiguous() for grad in grads]
    make, differentiate = activation(arguments[0], products.clamped, products.kernels)
    grad_both = grad_R1 = None
    if wanted[0]:
        h_RF, grad_both, grad_R1 = differentiate(_through(products, "down", grads, weights), *arguments)
    else:
        h_RF = make(*arguments)
    each = enumerate(zip(grads, wanted[1:], strict=True))
    return (
        grad_both,
        grad_R1,
        [products.weight_gradient(g, h_RF, None if i else add) if w else None for i, (g, w) in each],
    )


def _through(products: ExpertProducts, name: str, grads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient of tokens that several experts' weights multiplied: the sum of grad @ weight.

    `name` is the projection, "up" or "down", for the keys under which 8-bit weights are cached.
    """
    across = [products.weight_factor(f"{name} {i}, across", w.transpose(1, 2)) for i, w in enumerate(weights)]
    summands = (products.product(products.token_factor(g), w) for g, w in zip(grads, across, strict=True))
    out = next(summands)
    for summand in summands:  # only two exist at a time
        out += summand
    return out


# ---- the activation between them


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute gpt-oss's activation: gate * sigmoid(1.702 * gate) * (up + 1), with gate <= 7 and -7 <= up <= 7.

    Inputs equal to a bound, which are common among 16-bit numbers, pass their gradient. With `clamp` they do so until
    torch 2.13 only (github.com/pytorch/pytorch/issues/195931).
    """
    gate, up = gate.masked_fill(gate > 7.0, 7.0), up.masked_fill(up > 7.0, 7.0).masked_fill(up < -7.0, -7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def plain_swiglu(gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool) -> Tensor:
    """Compute the down projection's input, act(gate) * up * weight, by operations of torch: the kernel's reference.

    act is SiLU, or with `clamped` act(gate) * up is `clamped_swiglu`. Computes in the dtype of the routing weights and
    returns that of gate. The routing weight is applied here, so that backward needs no expert's output.
    """
    gate, up = gate_RF.to(weight_R1.dtype), up_RF.to(weight_R1.dtype)
    h_RF = clamped_swiglu(gate, up) if clamped else F.silu(gate) * up
    return (h_RF * weight_R1).to(gate_RF.dtype)


def plain_swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, clamped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of `plain_swiglu` (R, F), and its gradients, by operations of torch: the kernel's reference.

    Args:
        grad_RF: the gradient of the output of `plain_swiglu`.

    Returns:
        The output (R, F), which the gradient of w2 needs; the gradients of gate and up side by side (R, 2F); and the
        gradient of the routing weights (R, 1).
    """
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
    """Split `hidden`, which may be one tensor (R, 2F), into gate and up, (R, F) each."""
    return hidden if len(hidden) == 2 else hidden[0].chunk(2, 1)


def activation(x: Tensor, clamped: bool, kernels: str) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """Return two functions with the signatures of `plain_swiglu` and `plain_swiglu_backward`, `clamped` already bound.

    They are kernels if `kernels`, the option `[moe] kernels`, is "triton", or "auto" with x on a GPU and Triton
    installed; else the plain functions.
    """
    if fused(kernels, x):
        from titanmoe.ops.kernels.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward

        return partial(weighted_swiglu, clamped=clamped), partial(weighted_swiglu_backward, clamped=clamped)
    return partial(plain_swiglu, clamped=clamped), partial(plain_swiglu_backward, clamped=clamped)
