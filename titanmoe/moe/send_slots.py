"""The layout of a send buffer: assigns a slot to each choice of an expert, and fills slots with copies of tokens.

Dispatchers call it before they send; nothing is sent here. A choice is a pair of a token and an expert that it chose
(number E: "no expert"), numbered token * K + k. A slot is a row of the buffer, for a copy of a token for one expert, or
one etp rank of it. Slots are padded to slots_per_expert, or one behind the other. `ep` is the number of ranks among
which the experts are divided, `etp` the number of ranks that share each. `kernels` is the option `[moe] kernels`.

Shapes: T tokens, D model, K top-k, E experts, e local experts, G ranks, S slots of the send buffer, R received routed
tokens, C = T * K choices, X = etp copies of a choice, J = K * X copies of a token, P parts of the experts (ep).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.moe.permute import invert, permute_packed, permute_with_weights
from titanmoe.observe import named
from titanmoe.ops.kernels import fused


class Route(NamedTuple):
    """The links between tokens and the slots of a send buffer."""

    source_S: Tensor
    """The token in each slot; T in an empty one."""
    slot_TJ: Tensor
    """The slots of each token; S for a choice of no expert."""


def local_choices(chosen_NK: Tensor, part: int, experts: int) -> Tensor:
    """Return chosen experts numbered within a part of the experts; `experts` for those of other parts and for none.

    Parts are consecutive, of `experts` experts each; `part` is the index of this one.
    """
    chosen_NK = chosen_NK - part * experts
    return chosen_NK.where((chosen_NK >= 0) & (chosen_NK < experts), experts)


def sort_by_expert(chosen_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the T * K choices by expert, then by token, with choices of no expert last.

    Returns:
        The sorted choices, numbered token * K + k, (C,); and the number of choices of each expert (E,).
    """
    flat = chosen_TK.flatten()
    count = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    # A radix sort passes over the keys once per few bits: int16 is 2.8 times faster (CPU, 262,144 keys, 128 experts).
    keys = flat.to(torch.int16) if num_experts < 2**15 else flat
    return keys.argsort(stable=True), count[:num_experts]


@named("permute")
def assign_slots(
    chosen_TK: Tensor, order_C: Tensor, count_E: Tensor, *, ep: int, etp: int, slots_per_expert: int, num_slots: int
) -> tuple[Tensor, Tensor]:
    """Assign slots of a send buffer to each choice: one for each of the etp ranks of the chosen expert.

    The buffer has a block for each destination rank (ep outer, etp inner). A block is sorted by expert, and within an
    expert by token. Experts begin right behind each other, or every `slots_per_expert` slots if that is not 0.

    Args:
        chosen_TK: each token's chosen experts; E for no expert.
        order_C: the choices sorted by expert, from `sort_by_expert`.
        count_E: the number of choices of each expert.
        slots_per_expert: the number of slots of each expert, no fewer than its choices; 0 for as many as these.
        num_slots: the number of slots of the buffer, which have to suffice.

    Returns:
        The choice in each slot (S,), C in an empty one; and the slots of each choice (C, X), `num_slots` for no expert.
    """
    expert_C = chosen_TK.flatten()[order_C]
    place_C = torch.arange(expert_C.numel(), device=order_C.device)
    if slots_per_expert:
        # From a place in the sorted order to one in the padded expert buffers.
        start_E = F.pad(count_E.cumsum(0), (1, 0))
        place_C = place_C - start_E[expert_C] + expert_C * slots_per_expert
        length_P = count_E.new_full((ep,), count_E.numel() // ep * slots_per_expert)
    else:
        length_P = count_E.view(ep, -1).sum(1)
    block_C = (expert_C // (count_E.numel() // ep)).clamp(max=ep - 1)
    before_C = (length_P.cumsum(0) - length_P)[block_C]  # slots of earlier blocks, each repeated etp times
    copy_X = torch.arange(etp, device=order_C.device)
    row_CX = (place_C + (etp - 1) * before_C).unsqueeze(1) + copy_X * length_P[block_C].unsqueeze(1)
    row_CX = row_CX.where((expert_C < count_E.numel()).unsqueeze(1), num_slots)

    slot_CX = torch.empty_like(row_CX)
    slot_CX[order_C] = row_CX
    choice = order_C.new_full((num_slots + 1,), expert_C.numel())  # and one slot for choices of no expert
    choice[row_CX] = order_C.unsqueeze(1).expand_as(row_CX)
    return choice[:num_slots], slot_CX


@named("permute")
def fill_slots(
    x_TD: Tensor, weights_TK: Tensor, choice_S: Tensor, slot_CX: Tensor, kernels: str = "auto", packed: bool = False
) -> tuple[Tensor, Tensor | None, Route]:
    """Copy tokens and their routing weights into the slots of a send buffer. Differentiable.

    Args:
        choice_S: the choice in each slot, from `assign_slots`.
        slot_CX: the slots of each choice, from `assign_slots`.
        packed: whether each routing weight is written behind its routed token, in one tensor.

    Returns:
        The routed tokens (S, D); their routing weights (S, 1), or None if packed; and the links from slots back to
        tokens.
    """
    T, K = weights_TK.shape
    route = Route(choice_S // K, slot_CX.view(T, K * slot_CX.shape[1]))
    if packed:
        return permute_packed(x_TD, weights_TK, choice_S, route.slot_TJ), None, route
    return *permute_with_weights(x_TD, weights_TK, choice_S, route.slot_TJ, kernels), route


def truncate_buffer(x_SD: Tensor, used_slots: int) -> Tensor:
    """Return the first `used_slots` slots of a buffer (S, D), a view; the others are unused. Differentiable."""
    if torch.compiler.is_compiling():  # their number is not known then
        return x_SD.narrow(0, 0, used_slots)
    rest = x_SD.shape[0] - used_slots
    return x_SD.split([used_slots, rest])[0] if rest else x_SD  # so that backward need not copy


def truncate_route(route: Route, used_slots: int) -> Route:
    """Return the links between tokens and the first `used_slots` slots of a buffer; the others are unused.

    `used_slots` replaces S in slot_TJ, for a choice of no expert.
    """
    if not torch.compiler.is_compiling() and used_slots == len(route.source_S):
        return route
    return Route(route.source_S.narrow(0, 0, used_slots), route.slot_TJ.clamp(max=used_slots))


@named("permute")
def assign_unpadded_slots(
    chosen_TK: Tensor, num_experts: int, ep: int, etp: int, kernels: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Assign slots of a send buffer without padding, in a buffer of the largest possible size.

    It has T * K * etp slots. Those that are unused, because tokens chose no expert, come last.

    Returns:
        The choice in each slot (S,), numbered token * K + k, and C in an unused one; the slots of each choice (C, X), S
        for no expert; and the number of choices of each expert (E,).
    """
    if fused(kernels, chosen_TK):
        from titanmoe.ops.kernels import slot_kernels

        return slot_kernels.assign_unpadded_slots(chosen_TK, num_experts, ep, etp)
    order_C, count_E = sort_by_expert(chosen_TK, num_experts)
    return *assign_slots(
        chosen_TK, order_C, count_E, ep=ep, etp=etp, slots_per_expert=0, num_slots=chosen_TK.numel() * etp
    ), count_E


@named("permute")
def order_by_expert(count_Ge: Tensor, total: int, kernels: str = "auto") -> tuple[Tensor, Tensor]:
    """Return the permutation that sorts received routed tokens by expert, then sender; and its inverse.

    They are received by sender, then expert; x_RD[permutation] is sorted.

    Args:
        count_Ge: the number of routed tokens from each sender for each local expert.
        total: the sum of these numbers, as a Python number.
    """
    if fused(kernels, count_Ge):
        from titanmoe.ops.kernels import slot_kernels

        return slot_kernels.regroup(count_Ge, total)
    start_Ge = (count_Ge.flatten().cumsum(0) - count_Ge.flatten()).view_as(count_Ge)
    length = count_Ge.t().flatten()
    shift = start_Ge.t().flatten() - (length.cumsum(0) - length)
    order_R = torch.arange(total, device=count_Ge.device) + shift.repeat_interleave(length, output_size=total)
    return order_R, invert(order_R)
