"""Which gradients a backward pass wants from an autograd function with inputs and weights in one node.

Pipeline schedules that split backward run such a node twice: once for the gradients of its inputs, once for those of
its weights. `ctx.needs_input_grad` does not distinguish them; the engine's plan for the running pass does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_own_node(x: Tensor) -> Tensor:
    """The same tensor, not a leaf: the engine cannot say whether it will visit one."""
    if torch.compiler.is_compiling():  # a graph is never run for a part of its gradients
        return x
    return x.view_as(x) if x.is_leaf and x.requires_grad else x


def gradient_wanted(ctx: torch.autograd.function.FunctionCtx, number: int) -> bool:
    """Return whether the running backward pass wants the gradient of this input, which came through `with_own_node` or
    a node. In traced code `number` counts all inputs, so those that are tensors come first there."""
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad[number]
    node = ctx.next_functions[number][0]
    return node is not None and torch._C._will_engine_execute_node(node)
