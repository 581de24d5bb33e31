"""An expert's activation.

`hidden` is gate and up, (R, F) each, or both side by side, (R, 2F). Shapes as in titanmoe.moe.grouped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.ops.kernels import fused


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
    """Return both, (R, F) each."""
    return hidden if len(hidden) == 2 else hidden[0].chunk(2, 1)


def activation(x: Tensor, clamped: bool, kernels: str) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """Return the functions for the down projection's input and for gradients: a kernel on GPUs, else the plain
    formula."""
    if fused(kernels, x):
        from titanmoe.ops.kernels.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward

        return partial(weighted_swiglu, clamped=clamped), partial(weighted_swiglu_backward, clamped=clamped)
    return partial(plain_swiglu, clamped=clamped), partial(plain_swiglu_backward, clamped=clamped)
