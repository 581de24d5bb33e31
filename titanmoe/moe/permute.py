"""Copies tokens into the slots of a buffer, one for each expert they chose, and sums what comes back by token.

`permute_tokens` and `unpermute_tokens` are linear maps, each the other's transpose, so each is the other's backward.
`source_R` has the token in each slot, `slot_TJ` the slots of each token (titanmoe.moe.send_slots). Source T, one past
the last token, makes a row of zeros; slot R, one past the last slot, adds nothing. There are no atomics: the order of
every sum is fixed. `kernels` is the option `[moe] kernels`; titanmoe.ops.kernels.permute_rows has the kernels.

Shapes: T tokens, D width, R slots, each with a routed token or unused, J slots of a token, K weights of a token, P
width of a packed row, which has a routed token and its weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.recomputation import save_tensors
from titanmoe.ops.kernels import fused


def _copy(x_TD: Tensor, source_R: Tensor, kernels: str) -> Tensor:
    if fused(kernels, x_TD):
        from titanmoe.ops.kernels.permute_rows import fetch_rows

        return fetch_rows(x_TD, source_R)
    return F.pad(x_TD, (0, 0, 0, 1)).index_select(0, source_R)


def _sum(y_RD: Tensor, slot_TJ: Tensor, kernels: str) -> Tensor:
    if fused(kernels, y_RD):
        from titanmoe.ops.kernels.permute_rows import sum_rows

        return sum_rows(y_RD, slot_TJ)
    padded = F.pad(y_RD, (0, 0, 0, 1))
    if slot_TJ.shape[1] == 1:
        return padded.index_select(0, slot_TJ[:, 0])
    rows_TJD = padded.index_select(0, slot_TJ.flatten()).unflatten(0, slot_TJ.shape)  # twice as fast as padded[slot_TJ]
    return rows_TJD.sum(1)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, source_R, slot_TJ, kernels):
        ctx.save_for_backward(slot_TJ)
        ctx.kernels = kernels
        return _copy(x_TD, source_R, kernels)

    @staticmethod
    def backward(ctx, grad_RD):
        return _sum(grad_RD, *ctx.saved_tensors, ctx.kernels), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, source_R, slot_TJ, kernels):
        ctx.save_for_backward(source_R)
        ctx.kernels = kernels
        return _sum(y_RD, slot_TJ, kernels)

    @staticmethod
    def backward(ctx, grad_TD):
        return _copy(grad_TD, *ctx.saved_tensors, ctx.kernels), None, None, None


class _PermuteWithWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weights_TK, choice_R, slot_TJ):
        from titanmoe.ops.kernels.permute_rows import fetch_weighted_rows

        ctx.save_for_backward(slot_TJ)
        ctx.top_k = weights_TK.shape[1]
        return fetch_weighted_rows(x_TD, weights_TK, choice_R)

    @staticmethod
    def backward(ctx, grad_RD, grad_R1):
        from titanmoe.ops.kernels.permute_rows import sum_weighted_rows

        return *sum_weighted_rows(grad_RD, grad_R1, *ctx.saved_tensors, ctx.top_k), None, None


def permute_tokens(x_TD: Tensor, source_R: Tensor, slot_TJ: Tensor, kernels: str = "auto") -> Tensor:
    """Copy token source_R[r] into slot r: (R, D)."""
    with save_tensors():
        return _Permute.apply(x_TD, source_R, slot_TJ, kernels)


def unpermute_tokens(y_RD: Tensor, source_R: Tensor, slot_TJ: Tensor, kernels: str = "auto") -> Tensor:
    """Sum the rows in the slots slot_TJ[t] for each token t: (T, D)."""
    with save_tensors():
        return _Unpermute.apply(y_RD, source_R, slot_TJ, kernels)


def permute_with_weights(
    x_TD: Tensor, weights_TK: Tensor, choice_R: Tensor, slot_TJ: Tensor, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Copy tokens and their routing weights into slots.

    Slot r has choice c = choice_R[r]: token c // K, weight c % K of it.

    Returns:
        The routed tokens (R, D) and their routing weights (R, 1).
    """
    if fused(kernels, x_TD):
        with save_tensors():
            return _PermuteWithWeights.apply(x_TD, weights_TK, choice_R, slot_TJ)
    K = weights_TK.shape[1]
    weights_R1 = permute_tokens(
        weights_TK.reshape(-1, 1), choice_R, slot_TJ.view(weights_TK.numel(), slot_TJ.shape[1] // K), kernels
    )
    return permute_tokens(x_TD, choice_R // K, slot_TJ, kernels), weights_R1


class _PermutePacked(torch.autograd.Function):
    """`permute_packed` with its backward, whose incoming gradient is packed too."""

    @staticmethod
    def forward(ctx, x_TD, weights_TK, choice_R, slot_TJ):
        from titanmoe.ops.kernels.permute_rows import fetch_packed_rows

        ctx.save_for_backward(slot_TJ)
        ctx.top_k, ctx.wide = weights_TK.shape[1], weights_TK.dtype
        return fetch_packed_rows(x_TD, weights_TK, choice_R)

    @staticmethod
    def backward(ctx, grad_RP):
        from titanmoe.ops.kernels.permute_rows import sum_packed_rows

        return *sum_packed_rows(grad_RP, *ctx.saved_tensors, ctx.top_k, ctx.wide), None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed_RP, order_R, inverse_R, wide):
        from titanmoe.ops.kernels.permute_rows import fetch_unpacked_rows

        ctx.save_for_backward(inverse_R)
        return fetch_unpacked_rows(packed_RP, order_R, wide)

    @staticmethod
    def backward(ctx, grad_RD, grad_R1):
        from titanmoe.ops.kernels.permute_rows import fetch_packed_rows

        return fetch_packed_rows(grad_RD, grad_R1, *ctx.saved_tensors), None, None, None


def can_pack(x_TD: Tensor, kernels: str) -> bool:
    """Return whether routed tokens can be packed with their weights without an extra pass over them.

    The kernels that copy them have to run, and rows have to be multiples of 16 bytes.
    """
    return fused(kernels, x_TD) and x_TD.shape[1] * x_TD.element_size() % 16 == 0


def permute_packed(x_TD: Tensor, weights_TK: Tensor, choice_R: Tensor, slot_TJ: Tensor) -> Tensor:
    """Copy tokens and routing weights into slots as `permute_with_weights`, in one tensor (R, P).

    titanmoe.ops.kernels.permute_rows says where the weight is in a packed row.
    """
    with save_tensors():
        return _PermutePacked.apply(x_TD, weights_TK, choice_R, slot_TJ)


def reorder_and_unpack(
    packed_RP: Tensor, order_R: Tensor, inverse_R: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reorder packed rows, and split them into routed tokens (R, D) and their weights (R, 1).

    Args:
        wide: the dtype of the weights.
    """
    with save_tensors():
        return _Unpack.apply(packed_RP, order_R, inverse_R, wide)


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
    # Nothing points past the end, so the plain version need not pad.
    return _copy(x_RD, order_R, kernels) if fused(kernels, x_RD) else x_RD.index_select(0, order_R)


def reorder(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor, kernels: str = "auto") -> Tensor:
    """Return x[order_R], for a permutation whose inverse is inverse_R."""
    with save_tensors():
        return _Reorder.apply(x_RD, order_R, inverse_R, kernels)


def reorder_weighted(
    x_RD: Tensor, weights_R1: Tensor, order_R: Tensor, inverse_R: Tensor, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return routed tokens and their weights in the order of a permutation whose inverse is inverse_R."""
    if fused(kernels, x_RD):
        with save_tensors():
            return _PermuteWithWeights.apply(x_RD, weights_R1, order_R, inverse_R.unsqueeze(1))
    return reorder(x_RD, order_R, inverse_R, kernels), reorder(weights_R1, order_R, inverse_R, kernels)


def invert(order_R: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    inverse = torch.empty_like(order_R)
    inverse[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return inverse
