"""Copies tokens into the slots of a buffer, one for each expert they chose, and sums what comes back by token.

`permute_tokens` and `unpermute_tokens` are linear maps, each the other's transpose, so each is the other's backward.
`source_S` has the token in each slot, `slot_TJ` the slots of each token (titanmoe.moe.send_slots), `choice_S` the
choice in each slot, token * K + k. Source T (choice T * K), one past the last, makes a row of zeros; slot S, one past
the last slot, adds nothing. The order of every sum is fixed. `order_R` is a permutation, `inverse_R` its inverse.
`kernels` is the option `[moe] kernels`; titanmoe.ops.kernels.permute_rows has the kernels.

Shapes: T tokens, D width, S slots of a send buffer, each with a routed token or unused, J slots of a token, K weights
of a token, R received routed tokens, P width of a packed row, which has a routed token and its weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.recomputation import save_tensors
from titanmoe.ops.autograd_functions import apply_function
from titanmoe.ops.kernels import fused


def _copy(x_TD: Tensor, source_S: Tensor, kernels: str) -> Tensor:
    """Return row source_S[s] of x for each slot s, zeros where that is T: (S, D). Not differentiable."""
    if fused(kernels, x_TD):
        from titanmoe.ops.kernels.permute_rows import fetch_rows

        return fetch_rows(x_TD, source_S)
    return F.pad(x_TD, (0, 0, 0, 1)).index_select(0, source_S)


def _sum(y_SD: Tensor, slot_TJ: Tensor, kernels: str) -> Tensor:
    """Return the sum of each token's J rows of y, to which slot S adds nothing: (T, D). Not differentiable."""
    if fused(kernels, y_SD):
        from titanmoe.ops.kernels.permute_rows import sum_rows

        return sum_rows(y_SD, slot_TJ)
    padded = F.pad(y_SD, (0, 0, 0, 1))
    if slot_TJ.shape[1] == 1:
        return padded.index_select(0, slot_TJ[:, 0])
    rows_TJD = padded.index_select(0, slot_TJ.flatten()).unflatten(0, slot_TJ.shape)  # twice as fast as padded[slot_TJ]
    return rows_TJD.sum(1)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, source_S, slot_TJ, kernels):
        ctx.save_for_backward(slot_TJ)
        ctx.kernels = kernels
        return _copy(x_TD, source_S, kernels)

    @staticmethod
    def backward(ctx, grad_SD):
        return _sum(grad_SD, *ctx.saved_tensors, ctx.kernels), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_SD, source_S, slot_TJ, kernels):
        ctx.save_for_backward(source_S)
        ctx.kernels = kernels
        return _sum(y_SD, slot_TJ, kernels)

    @staticmethod
    def backward(ctx, grad_TD):
        return _copy(grad_TD, *ctx.saved_tensors, ctx.kernels), None, None, None


class _PermuteWithWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weights_TK, choice_S, slot_TJ):
        from titanmoe.ops.kernels.permute_rows import fetch_weighted_rows

        ctx.save_for_backward(slot_TJ)
        ctx.top_k = weights_TK.shape[1]
        return fetch_weighted_rows(x_TD, weights_TK, choice_S)

    @staticmethod
    def backward(ctx, grad_SD, grad_S1):
        from titanmoe.ops.kernels.permute_rows import sum_weighted_rows

        return *sum_weighted_rows(grad_SD, grad_S1, *ctx.saved_tensors, ctx.top_k), None, None


def permute_tokens(x_TD: Tensor, source_S: Tensor, slot_TJ: Tensor, kernels: str = "auto") -> Tensor:
    """Copy token source_S[s] into slot s: (S, D). Differentiable: backward sums the slots of each token."""
    with save_tensors():
        return apply_function(_Permute, x_TD, source_S, slot_TJ, kernels)


def unpermute_tokens(y_SD: Tensor, source_S: Tensor, slot_TJ: Tensor, kernels: str = "auto") -> Tensor:
    """Sum the rows in slots slot_TJ[t] for each token t: (T, D). Differentiable: backward copies tokens into slots."""
    with save_tensors():
        return apply_function(_Unpermute, y_SD, source_S, slot_TJ, kernels)


def permute_with_weights(
    x_TD: Tensor, weights_TK: Tensor, choice_S: Tensor, slot_TJ: Tensor, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Copy tokens and their routing weights into slots: (S, D) and (S, 1). Differentiable."""
    if fused(kernels, x_TD):
        with save_tensors():
            return apply_function(_PermuteWithWeights, x_TD, weights_TK, choice_S, slot_TJ)
    K = weights_TK.shape[1]
    weights_S1 = permute_tokens(
        weights_TK.reshape(-1, 1), choice_S, slot_TJ.view(weights_TK.numel(), slot_TJ.shape[1] // K), kernels
    )
    return permute_tokens(x_TD, choice_S // K, slot_TJ, kernels), weights_S1


class _PermutePacked(torch.autograd.Function):
    """The autograd function of `permute_packed`. The gradient that it receives is packed too."""

    @staticmethod
    def forward(ctx, x_TD, weights_TK, choice_S, slot_TJ):
        from titanmoe.ops.kernels.permute_rows import fetch_packed_rows

        ctx.save_for_backward(slot_TJ)
        ctx.top_k, ctx.weights_dtype = weights_TK.shape[1], weights_TK.dtype
        return fetch_packed_rows(x_TD, weights_TK, choice_S)

    @staticmethod
    def backward(ctx, grad_SP):
        from titanmoe.ops.kernels.permute_rows import sum_packed_rows

        return *sum_packed_rows(grad_SP, *ctx.saved_tensors, ctx.top_k, ctx.weights_dtype), None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed_RP, order_R, inverse_R, weights_dtype):
        from titanmoe.ops.kernels.permute_rows import fetch_unpacked_rows

        ctx.save_for_backward(inverse_R)
        return fetch_unpacked_rows(packed_RP, order_R, weights_dtype)

    @staticmethod
    def backward(ctx, grad_RD, grad_R1):
        from titanmoe.ops.kernels.permute_rows import fetch_packed_rows

        return fetch_packed_rows(grad_RD, grad_R1, *ctx.saved_tensors), None, None, None


def can_pack(x_TD: Tensor, kernels: str) -> bool:
    """Return whether each routed token and its routing weight can be copied into one row of bytes at no extra cost.

    So they need one message instead of two. Kernels have to run, and a token has to be a multiple of 16 bytes.
    """
    return fused(kernels, x_TD) and x_TD.shape[1] * x_TD.element_size() % 16 == 0


def permute_packed(x_TD: Tensor, weights_TK: Tensor, choice_S: Tensor, slot_TJ: Tensor) -> Tensor:
    """Copy tokens into slots, each followed by its routing weight in the same row: (S, P). Differentiable.

    Rows have the tokens' dtype; the weight's bytes follow the token's. Only where `can_pack` holds.
    """
    with save_tensors():
        return apply_function(_PermutePacked, x_TD, weights_TK, choice_S, slot_TJ)


def reorder_and_unpack(
    packed_RP: Tensor, order_R: Tensor, inverse_R: Tensor, weights_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reorder the rows of `permute_packed`, and split them into routed tokens (R, D) and routing weights (R, 1).

    Differentiable. Row r of the result is row order_R[r] of the packed rows.
    """
    with save_tensors():
        return apply_function(_Unpack, packed_RP, order_R, inverse_R, weights_dtype)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, order_R, inverse_R, kernels):
        ctx.save_for_backward(inverse_R)
        ctx.kernels = kernels
        return _move(x_RD, order_R, kernels)

    @staticmethod
    def backward(ctx, grad_RD):
        return _move(grad_RD, *ctx.saved_tensors, ctx.kernels), None, None, None


def _move(x_RD: Tensor, order_R: Tensor, kernels: str) -> Tensor:
    """Return x[order_R], by a kernel or by torch. Not differentiable. No index may be R."""
    return _copy(x_RD, order_R, kernels) if fused(kernels, x_RD) else x_RD.index_select(0, order_R)


def reorder(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor, kernels: str = "auto") -> Tensor:
    """Return x_RD[order_R], for a permutation order_R whose inverse is inverse_R. Differentiable."""
    with save_tensors():
        return apply_function(_Reorder, x_RD, order_R, inverse_R, kernels)


def reorder_weighted(
    x_RD: Tensor, weights_R1: Tensor, order_R: Tensor, inverse_R: Tensor, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return x_RD[order_R] and weights_R1[order_R], for a permutation whose inverse is inverse_R. Differentiable."""
    if fused(kernels, x_RD):
        with save_tensors():
            return apply_function(_PermuteWithWeights, x_RD, weights_R1, order_R, inverse_R.unsqueeze(1))
    return reorder(x_RD, order_R, inverse_R, kernels), reorder(weights_R1, order_R, inverse_R, kernels)


def invert(order_R: Tensor) -> Tensor:
    """Return the inverse of a permutation: out[order_R[r]] = r."""
    inverse = torch.empty_like(order_R)
    inverse[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return inverse
