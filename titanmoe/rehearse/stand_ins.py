"""Replacements for what fake CPU tensors cannot run: GPU attention, norms, grouped matmuls and some Triton kernels.

A stand-in has the result shapes of the GPU's kernel and saves the same tensors for backward. Stand-ins of kernels that
decide shapes compute their integers too.

Shapes: B samples, S positions of the attention slice, L sequence, H query heads, G key heads or ranks of the dispatch
group, h head, D model, N choices (tokens times top-k), e local experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.models.layers import promote
from titanmoe.moe.send_slots import assign_unpadded_slots, order_by_expert
from titanmoe.parallel.context import LseCallback
from titanmoe.replace import replaced

_aten = torch.ops.aten
_rms_norm = F.rms_norm


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Replace torch's scaled_dot_product_attention on fake CPU tensors by the kernel that torch would choose on a GPU.

    q, k, v and the result are (batch, heads, sequence, head dim).

    Args:
        k: keys; may have fewer heads than q.
        v: values; as many heads as k.
        mask: True where a query attends to a key; None for no mask.
        is_causal: whether a query attends to no later key.
        enable_gqa: not used: fewer heads of k and v are always taken.
    """
    return _attention_and_lse(q, k, v, mask, is_causal)[0]


def _attention_and_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    if mask is None and narrow and q.shape[-1] == v.shape[-1] <= 256:
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        mask = mask.expand(q.shape[0], q.shape[1], -1, -1)
    return _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal)[:2]


def flex_attention(
    q_BSHh: Tensor, k_BLGh: Tensor, v_BLGh: Tensor, mask: Any, sinks_H: Tensor | None, report_lse: LseCallback = None
) -> Tensor:
    """Stand in for `titanmoe.parallel.flex.flex`: another kernel of attention that saves tensors of the same shapes.

    Its numbers are those of a causal mask. The result is (B, S, H, h).

    Args:
        k_BLGh: keys; G may be fewer heads than H.
        mask: not used.
        sinks_H: logit of each head's sink; None without sinks.
        report_lse: called with the log of the sum of exponentials, (B, H, S), detached; None for no call.
    """
    out, lse = _attention_and_lse(*(x.transpose(1, 2) for x in (q_BSHh, k_BLGh, v_BLGh)), None, True)
    lse = lse[..., : q_BSHh.shape[1]]
    if report_lse is not None:
        report_lse(lse.detach())
    if sinks_H is not None:
        out = (out * torch.sigmoid(lse - promote(sinks_H).view(-1, 1)).unsqueeze(-1)).to(q_BSHh.dtype)
    return out.transpose(1, 2)


@torch.library.custom_op("rehearsal::_fused_rms_norm", mutates_args=())
def _fused_rms_norm(x: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return fake tensors with the shapes of the normalized x and of its scale per token.

    It replaces aten::_fused_rms_norm, so that the norm counts as one kernel as on a GPU, not as the CPU's several. Real
    tensors raise NotImplementedError.
    """
    raise NotImplementedError


@_fused_rms_norm.register_fake
def _(x: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1, dtype=wide)


class _Norm(torch.autograd.Function):
    """RMSNorm of fake tensors as one kernel in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor) -> Tensor:
        y, scale = _fused_rms_norm(x, weight_D)
        ctx.save_for_backward(x, scale, weight_D)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, weight_D = ctx.saved_tensors
        return _aten._fused_rms_norm_backward(grad, x, weight_D.shape, scale, weight_D, [True, True])


def rms_norm(x: Tensor, shape: Any, weight_D: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Replace torch's rms_norm by the fused kernel of GPUs if input and weight have one dtype; else run torch's own.

    Args:
        x: input, whose last dimension is normalised; the result has its shape.
        shape: torch's normalized_shape; the fused kernel does not use it.
        weight_D: factors; None runs torch's own.
        eps: torch's eps; the fused kernel does not use it.
    """
    if weight_D is None or weight_D.dtype != x.dtype:
        return _rms_norm(x, shape, weight_D, eps)
    return _Norm.apply(x, weight_D)


@contextmanager
def gpu_stand_ins() -> Iterator[None]:
    """Replace attention and RMSNorm by their stand-ins within this context."""
    with replaced(F, "scaled_dot_product_attention", attention), replaced(F, "rms_norm", rms_norm):
        yield


def grouped_product(
    x: Tensor, w: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty result of torch._grouped_mm, in x's dtype; torch infers its shape only in bfloat16.

    x (R, D) times w (e, D, F) is (R, F). x (D, R) times w (R, F) is (e, D, F), one product for each of e groups.

    Args:
        offs: end of each group in R; used only if w has two dimensions.
        bias: not used.
        out_dtype: not used.
    """
    if w.dim() == 3:
        return x.new_empty(x.shape[0], w.shape[2])
    return x.new_empty(offs.shape[0], x.shape[0], w.shape[1])


# Formulas of Triton kernels that compute integers, with which known integers stay known.


def count_choices(chosen_N: Tensor, experts: int) -> Tensor:
    """Compute in plain PyTorch what the Triton kernel `count_choices` does.

    Returns how many choices each expert has in each block of consecutive choices, (experts, blocks) in int32. Blocks
    are those of the kernel.

    Args:
        chosen_N: The expert of each choice; `experts` for none, which is not counted.
    """
    from titanmoe.ops.kernels import slot_kernels

    blocks = slot_kernels.number_of_blocks(len(chosen_N), experts)
    block_N = torch.arange(len(chosen_N)) // slot_kernels.launch_constants(experts)["ROWS"]
    count = torch.bincount(chosen_N * blocks + block_N, minlength=(experts + 1) * blocks)
    return count.view(experts + 1, blocks)[:experts].to(torch.int32)


def assign_choices(chosen_N: Tensor, ends: Tensor, experts: int, ep: int, etp: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute in plain PyTorch what the Triton kernel `assign_choices` does: give every choice etp slots.

    Slots are sorted by the rank that they go to, then by expert.

    Args:
        chosen_N: The expert of each choice; `experts` for none.
        ends: Not used.

    Returns:
        The choice in each of the N * etp slots, N in unused ones, which come last; the slots of each choice, (N, etp);
        and each expert's number of choices, (experts,).
    """
    return assign_unpadded_slots(chosen_N.unsqueeze(1), experts, ep, etp, "torch")


def regroup(count_Ge: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Compute in plain PyTorch what the Triton kernel `regroup` does.

    Args:
        count_Ge: The routed tokens received from each rank for each local expert.
        rows: The number of received tokens.

    Returns:
        The order (rows,) that sorts tokens, which arrive by sender and then expert, by expert and then sender; and its
        inverse.
    """
    return order_by_expert(count_Ge, rows, "torch")


FORMULAS = {f"titanmoe::{formula.__name__}": formula for formula in (count_choices, assign_choices, regroup)}
