"""What our autograd functions share: which gradients the running backward pass wants, and calls that want none.

Pipeline schedules that split backward run a node with inputs and weights twice: once for the gradients of its inputs,
once for those of its weights. `ctx.needs_input_grad` does not distinguish the two; the engine's plan for the running
pass does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def apply_function(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Return `function.apply(*inputs)`; where gradients are switched off, run its forward alone, which is faster."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*inputs)
    context = FunctionCtx()
    context.needs_input_grad = (False,) * len(inputs)
    return function.forward(context, *inputs)


def as_non_leaf(x: Tensor) -> Tensor:
    """Return a view of x if x is a leaf that requires a gradient, else x. Traced code always gets x itself.

    `wants_gradient` needs it: autograd's engine cannot say whether it will visit a leaf.
    """
    if torch.compiler.is_compiling():  # a graph is never run for a part of its gradients
        return x
    return x.view_as(x) if x.is_leaf and x.requires_grad else x


def wants_gradient(ctx: FunctionCtx, index: int) -> bool:
    """Return whether the running backward pass wants the gradient of an input of an autograd function.

    Args:
        ctx: the context of the autograd function, in its backward.
        index: the index of the input among those that are tensors. The input came through `as_non_leaf` or from
            another node. In traced code all inputs are counted, so that tensors have to come first.
    """
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad[index]
    node = ctx.next_functions[index][0]
    return node is not None and torch._C._will_engine_execute_node(node)
