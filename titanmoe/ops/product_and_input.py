"""A product of an input that other products, such as keys and values, go on to use.

Autograd would add their gradients of the input in passes of their own, each of which reads two tensors of its size and
writes one. Here a product of backward begins from the sum so far, which costs it one read.

Shapes: x (..., D), w (N, D), b (N,), R rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.ops.split_backward import gradient_wanted, with_own_node


class _ProductAndInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        return F.linear(x, w, b), x

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        grad_RN, grad_w, grad_b = grad_y.flatten(0, -2), None, None
        grad_x = torch.addmm(grad_x.flatten(0, -2), grad_RN, w).view(grad_x.shape) if gradient_wanted(ctx, 0) else None
        if gradient_wanted(ctx, 1):
            grad_w = grad_RN.t() @ x.flatten(0, -2)
        if len(ctx.next_functions) == 3 and gradient_wanted(ctx, 2):
            grad_b = grad_RN.sum(0)
        return grad_x, grad_w, grad_b


def product_and_input(x: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x w^T + b, and x for the next product: its gradient becomes part of this one's."""
    if torch.compiler.is_compiling():  # the compiler adds gradients where it likes
        return F.linear(x, w, b), x
    return _ProductAndInput.apply(*(y if y is None else with_own_node(y) for y in (x, w, b)))
