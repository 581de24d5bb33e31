"""The router's float32 product on GPUs, as products of bfloat16 terms (an H100 multiplies those 15 times as fast).

The input x is bfloat16. A float32 number is the sum of three bfloat16 terms, whose products are exact in float32:

    logits = x w1 + x w2 + x w3               w1 = bfloat16(w), w2 = bfloat16(w - w1), w3 = w - w1 - w2
    dw     = x g1 + x g2 + x g3
    dx     = g1 w1 + g2 w1 + g1 w2, rounded to bfloat16 as the gradient of x is anyway

Called by titanmoe.moe.router. Each line is one product, with the terms side by side.
Shapes: T tokens, D model, E experts, X four terms side by side; R and C rows and columns of a matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanmoe.ops import device
from titanmoe.ops.autograd_functions import apply_function, as_non_leaf, wants_gradient
from titanmoe.ops.kernels import fused


def uses_terms(setting: str, x_TD: Tensor, router_dtype: torch.dtype) -> bool:
    """Return whether the router multiplies float32 numbers as sums of bfloat16 terms.

    It does on GPUs, for tokens in bfloat16 and a router in float32, if `setting`, `[moe] router_product`, is "auto".
    """
    fits = x_TD.dtype == torch.bfloat16 and router_dtype == torch.float32
    return setting == "auto" and fits and device.kind(x_TD) == "cuda"


def plain_bfloat16_terms(x_RC: Tensor, backwards: bool) -> Tensor:
    """Split float32 numbers into three bfloat16 terms that sum to them: (R, 4, C), the first term twice.

    The order along dim 1 is first, first, second, third; reversed if `backwards`. The last three of g reversed and the
    first three of w in order meet as in the formula of dx.
    """
    first = x_RC.bfloat16()
    rest = x_RC - first
    second = rest.bfloat16()
    terms = [first, first, second, (rest - second).bfloat16()]
    return torch.stack(terms[::-1] if backwards else terms, 1)


def _terms(x_RC: Tensor, backwards: bool, kernels: str) -> Tensor:
    """Return what `plain_bfloat16_terms` does, by a kernel if `kernels` allows it."""
    if fused(kernels, x_RC):
        from titanmoe.ops.kernels.bfloat16_terms import bfloat16_terms

        return bfloat16_terms(x_RC.contiguous(), backwards)
    return plain_bfloat16_terms(x_RC, backwards)


def _product_on_gpu(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two bfloat16 matrices with a float32 result."""
    return device.choose(a, _product_on_gpu, cpu=lambda a, b: a.float() @ b.float())(a, b)


class _ProductByTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_ED: Tensor, kernels: str) -> Tensor:
        E, D = w_ED.shape
        terms_XD = _terms(w_ED.view(1, -1), False, kernels).view(4 * E, D)
        ctx.save_for_backward(x_TD if ctx.needs_input_grad[1] else None, terms_XD)
        ctx.kernels = kernels
        return _wide_product(x_TD, terms_XD[E:].t()).unflatten(1, (3, E)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, terms_XD = ctx.saved_tensors
        E, dx_TD, dw_ED = grad_TE.shape[1], None, None
        grads_TX = _terms(grad_TE, True, ctx.kernels).flatten(1)  # g3 g2 g1 g1
        if wants_gradient(ctx, 1):
            dw_ED = _wide_product(grads_TX[:, : 3 * E].t(), x_TD).unflatten(0, (3, E)).sum(0)
        if wants_gradient(ctx, 0):
            dx_TD = grads_TX[:, E:] @ terms_XD[: 3 * E]
        return dx_TD, dw_ED, None


def product_by_terms(x_TD: Tensor, w_ED: Tensor, kernels: str) -> Tensor:
    """Return x w^T (T, E) in float32, by products of bfloat16 terms. Differentiable.

    x is in bfloat16, w in float32. Result and dw differ from the exact product by at most (n + 2) 2^-23 sum |x| |w| of
    n terms, twice the bound of a float32 product; dx, before it is rounded, by at most 2^-14 sum |g| |w| more.
    """
    return apply_function(_ProductByTerms, as_non_leaf(x_TD), as_non_leaf(w_ED), kernels)
