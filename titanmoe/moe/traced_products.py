"""The products of a rank's experts as operations of a torch.compile graph, which does not look into them.

torch's grouped product can be traced in bfloat16 only, a loop over experts not at all, and inductor's backward fails
for a rank without a token. As operations (torch.library), both steps run the formulas of titanmoe.moe.expert_products
in every dtype, for any number of tokens. `groups` is the number of each expert's tokens; then, if `method` is
"grouped", their running sums in int32, or, for "loop", a copy on the host. `clamped` says that the activation is
gpt-oss's clamped SwiGLU. `hidden` is gate and up, (R, F) each, or both side by side, (R, 2F).

Shapes: R routed tokens sorted by local expert, e local experts, D model, F this rank's hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanmoe.moe.expert_products import (
    ExpertProducts,
    ProductMethod,
    activate,
    down_backward,
    gate_and_up,
    multiply,
    plain_swiglu,
    up_backward,
)
from titanmoe.moe.grouped_mm import Groups


@dataclass(eq=False, kw_only=True)
class TracedProducts:
    """The matrix products of one call of a layer's experts inside torch.compile, each as one operation of torch."""

    groups: list[Tensor]
    """The number of each expert's tokens, and that number in the form that `method` needs.

    For "grouped" the index of the token after each expert's last, for "loop" a copy on the host; nothing more for
    "even". Made once for all operations of a layer.
    """
    method: ProductMethod
    clamped: bool
    kernels: str
    index_R: Tensor | None = None
    """Global index of each routed token, for dropout of the experts' adapters; None without it."""

    @staticmethod
    def of(count_e: Tensor, method: ProductMethod, clamped: bool, kernels: str) -> TracedProducts:
        """Create the products of one call, which takes these numbers of tokens. For "loop" on GPUs the host waits.

        `count_e` is the number of tokens of each local expert, on the device.
        """
        groups = [count_e]
        if method == "grouped":
            groups.append(count_e.cumsum(0, dtype=torch.int32))
        elif method == "loop":
            groups.append(count_e.to("cpu"))  # on GPUs the host waits
        return TracedProducts(groups=groups, method=method, clamped=clamped, kernels=kernels)

    def up(self, x_RD: Tensor, *weights: Tensor, sums: Sequence[None] = ()) -> tuple[Tensor, ...]:
        """Return the product of the tokens with each of the weights (e, F, D), one tensor (R, F) each. Differentiable.

        `sums` is ignored: traced calls do not sum gradients over microbatches.
        """
        return tuple(experts_up(x_RD, weights, self.groups, self.method, self.clamped, self.kernels))

    def down(
        self, hidden: tuple[Tensor, ...], weight_R1: Tensor, *weights: Tensor, add: None = None
    ) -> tuple[Tensor, ...]:
        """Return the product of the down projection's input with each of the weights (e, D, F), one tensor (R, D) each.

        The input is act(gate) * up * routing weight. Differentiable. `add` is ignored: traced calls do not sum
        gradients over microbatches.
        """
        constants = self.groups, self.method, self.clamped, self.kernels
        return tuple(experts_down(hidden, weight_R1, weights, *constants))

    def down_input(self, hidden: tuple[Tensor, ...], weight_R1: Tensor) -> Tensor:
        """Return the down projection's input, act(gate) * up * routing weight: (R, F). Differentiable.

        Of operations of torch, which the compiler fuses, unlike `up` and `down`.
        """
        return plain_swiglu(*gate_and_up(hidden), weight_R1, self.clamped)


def _products(groups: Sequence[Tensor], method: ProductMethod, clamped: bool, kernels: str) -> ExpertProducts:
    """Return the eager products by which an operation computes, with the forms of the counts that `groups` has."""
    made = Groups(groups[0])
    if method == "grouped":
        made.ends_e = groups[1]
    elif method == "loop":
        made.sizes = groups[1].tolist()
    return ExpertProducts(groups=made, method=method, clamped=clamped, kernels=kernels)


@torch.library.custom_op("titanmoe::experts_up", mutates_args=())
def experts_up(
    x_RD: Tensor, weights: Sequence[Tensor], groups: Sequence[Tensor], method: str, clamped: bool, kernels: str
) -> list[Tensor]:
    """Multiply routed tokens by their experts' weights, as one operation that torch.compile does not trace into.

    Differentiable. `weights` are of all local experts, (e, F, D) each; the result is the product with each, (R, F).
    """
    return multiply(_products(groups, method, clamped, kernels), "up", x_RD, weights)


@experts_up.register_fake
def _(x_RD, weights, *_):
    """Return empty tensors of the shapes of `experts_up`'s results, for tracing."""
    return [x_RD.new_empty(x_RD.shape[0], w.shape[1]) for w in weights]


@torch.library.custom_op("titanmoe::experts_up_backward", mutates_args=())
def experts_up_backward(
    grads: Sequence[Tensor],
    x_RD: Tensor | None,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    groups: Sequence[Tensor],
    method: str,
    clamped: bool,
    kernels: str,
) -> list[Tensor]:
    """Compute the wanted gradients of `experts_up`: of the tokens first, then of each weight. Others are left out.

    Args:
        grads: the gradient of the product with each weight.
        x_RD: the tokens; None if no weight's gradient is wanted.
        wanted: whether the gradient is wanted, in that order.
    """
    products = _products(groups, method, clamped, kernels)
    grad_x, grad_weights = up_backward(products, grads, x_RD, weights, wanted)
    return [grad for grad in (grad_x, *grad_weights) if grad is not None]


@experts_up_backward.register_fake
def _(grads, x_RD, weights, wanted, *_):
    """Return empty tensors of the shapes of `experts_up_backward`'s results, for tracing."""
    grad_x = [grads[0].new_empty(grads[0].shape[0], weights[0].shape[2])] if wanted[0] else []
    return grad_x + [w.new_empty(w.shape) for w, wants in zip(weights, wanted[1:], strict=True) if wants]


@torch.library.custom_op("titanmoe::experts_down", mutates_args=())
def experts_down(
    hidden: Sequence[Tensor],
    weight_R1: Tensor,
    weights: Sequence[Tensor],
    groups: Sequence[Tensor],
    method: str,
    clamped: bool,
    kernels: str,
) -> list[Tensor]:
    """Multiply act(gate) * up * routing weight by the experts' weights, as one operation that is not traced into.

    Differentiable. `weights` are of all local experts, (e, D, F) each; the result is the product with each, (R, D).
    """
    products = _products(groups, method, clamped, kernels)
    return multiply(products, "down", activate(products, hidden, weight_R1), weights)


@experts_down.register_fake
def _(hidden, weight_R1, weights, *_):
    """Return empty tensors of the shapes of `experts_down`'s results, for tracing."""
    return [hidden[0].new_empty(hidden[0].shape[0], w.shape[1]) for w in weights]


@torch.library.custom_op("titanmoe::experts_down_backward", mutates_args=())
def experts_down_backward(
    grads: Sequence[Tensor],
    hidden: Sequence[Tensor],
    weight_R1: Tensor,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    groups: Sequence[Tensor],
    method: str,
    clamped: bool,
    kernels: str,
) -> list[Tensor]:
    """Compute the wanted gradients of `experts_down`. Those not wanted are left out.

    Args:
        grads: the gradient of the product with each weight.
        wanted: whether the gradient is wanted: of `hidden` and the routing weights together first, then of each weight.

    Returns:
        The gradients of gate and up side by side (R, 2F), of the routing weights (R, 1), and of each weight.
    """
    products = _products(groups, method, clamped, kernels)
    grad_both, grad_R1, grad_weights = down_backward(products, grads, hidden, weight_R1, weights, wanted=wanted)
    return [grad for grad in (grad_both, grad_R1, *grad_weights) if grad is not None]


@experts_down_backward.register_fake
def _(grads, hidden, weight_R1, weights, wanted, *_):
    """Return empty tensors of the shapes of `experts_down_backward`'s results, for tracing."""
    rows, width = hidden[0].shape[0], weights[0].shape[2]
    inputs = [hidden[0].new_empty(rows, 2 * width), weight_R1.new_empty(weight_R1.shape)] if wanted[0] else []
    return inputs + [w.new_empty(w.shape) for w, wants in zip(weights, wanted[1:], strict=True) if wants]


def _save_up(ctx, inputs, output):
    """Save the inputs of `experts_up` for backward, the tokens only if a weight needs a gradient; not its output."""
    x_RD, weights, groups, *ctx.constants = inputs
    ctx.wanted, ctx.groups = list(ctx.needs_input_grad[: 1 + len(weights)]), len(groups)  # flat, unlike in backward
    ctx.save_for_backward(*groups, *weights, *([x_RD] if any(ctx.wanted[1:]) else []))


def _differentiate_up(ctx, grads):
    """Return the gradients of the inputs of `experts_up`, None for those that need none, by `experts_up_backward`."""
    n, end = ctx.groups, ctx.groups + len(ctx.wanted) - 1
    groups, weights, rows = ctx.saved_tensors[:n], ctx.saved_tensors[n:end], ctx.saved_tensors[end:]
    out = iter(experts_up_backward(grads, rows[0] if rows else None, weights, ctx.wanted, groups, *ctx.constants))
    grad_x, *grad_weights = (next(out) if wants else None for wants in ctx.wanted)
    return grad_x, grad_weights, [None] * n, None, None, None


def _save_down(ctx, inputs, output):
    """Save the inputs of `experts_down` for backward: backward recomputes the activation from them."""
    hidden, weight_R1, weights, groups, *ctx.constants = inputs
    n = ctx.parts = len(hidden)
    needs = ctx.needs_input_grad
    ctx.wanted = [any(needs[: n + 1]), *needs[n + 1 : n + 1 + len(weights)]]
    ctx.save_for_backward(*hidden, weight_R1, *weights, *groups)


def _differentiate_down(ctx, grads):
    """Return the gradients of the inputs of `experts_down`, None for those not needed, by `experts_down_backward`."""
    n, end = ctx.parts, ctx.parts + len(ctx.wanted)
    hidden, weight_R1, weights = ctx.saved_tensors[:n], ctx.saved_tensors[n], ctx.saved_tensors[n + 1 : end]
    groups = ctx.saved_tensors[end:]
    out = iter(experts_down_backward(grads, hidden, weight_R1, weights, ctx.wanted, groups, *ctx.constants))
    grad_hidden, grad_R1 = [None] * n, None
    if ctx.wanted[0]:
        grad_hidden, grad_R1 = list(next(out).chunk(n, 1)), next(out)
    grad_weights = [next(out) if wants else None for wants in ctx.wanted[1:]]
    return grad_hidden, grad_R1, grad_weights, [None] * len(groups), None, None, None


experts_up.register_autograd(_differentiate_up, setup_context=_save_up)
experts_down.register_autograd(_differentiate_down, setup_context=_save_down)
