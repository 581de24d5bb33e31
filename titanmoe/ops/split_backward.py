"""Which gradients a backward pass wants from an autograd function with inputs and weights in one node.

Pipeline schedules that split backward run such a node twice: once for the gradients of its inputs, once for those of
its weights. `ctx.needs_input_grad` does not distinguish them; the engine's plan for the running pass does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_own_node(x: Tensor) -> Tensor:
    """The same tensor, not a leaf: the engine cannot say whether it will visit one."""
    return x.view_as(x) if x.is_leaf and x.requires_grad else x


def gradient_wanted(ctx: torch.autograd.function.FunctionCtx, number: int) -> bool:
    """Whether the running backward pass wants the gradient of this input; it came through `with_own_node` or a node."""
    node = ctx.next_functions[number][0]
    return node is not None and torch._C._will_engine_execute_node(node)
