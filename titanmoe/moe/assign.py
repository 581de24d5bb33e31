"""Gives each choice of an expert a row in a send buffer, and copies tokens into these rows. Nothing is sent here.

Shapes: T tokens, D model, K top-k, E experts, e local experts, G ranks, R rows of the buffer, P destination ranks.
An entry is one of the T * K choices, numbered token * K + slot. Expert number E stands for "no expert".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.moe.permute import invert, to_packed_rows, to_weighted_rows
from titanmoe.observe import named
from titanmoe.ops.kernels import fused


class Route(NamedTuple):
    """The link between the tokens and the rows of a buffer."""

    source_R: Tensor  # the token of each row
    slot_TJ: Tensor  # the rows of each token


def sort_by_expert(chosen_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The entries sorted by expert, then by token, with those for no expert last; and each expert's count."""
    flat = chosen_TK.flatten()
    count = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    # A radix sort passes over the keys once per few bits: int16 is 2.8 times faster (CPU, 262,144 keys, 128 experts).
    keys = flat.to(torch.int16) if num_experts < 2**15 else flat
    return keys.argsort(stable=True), count[:num_experts]


@named("permute")
def assign_rows(
    chosen_TK: Tensor, order: Tensor, count_E: Tensor, ep: int, etp: int, bin_rows: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Assign every entry's etp copies to rows of a buffer: one block per rank (ep outer, etp inner), sorted by
    expert within a block and by token within an expert; experts start right after each other, or every `bin_rows` rows.

    Returns the entry of each row (T*K for an empty row) and the rows of each entry, (T*K, etp) (`rows` for no expert).
    """
    expert = chosen_TK.flatten()[order]
    place = torch.arange(expert.numel(), device=order.device)
    if bin_rows:
        # From a place in the sorted order to a place in the bins.
        start_E = F.pad(count_E.cumsum(0), (1, 0))
        place = place - start_E[expert] + expert * bin_rows
        length_P = count_E.new_full((ep,), count_E.numel() // ep * bin_rows)
    else:
        length_P = count_E.view(ep, -1).sum(1)
    block = (expert // (count_E.numel() // ep)).clamp(max=ep - 1)
    before = (length_P.cumsum(0) - length_P)[block]  # rows of earlier blocks, each repeated etp times
    copy = torch.arange(etp, device=order.device)
    row = (place + (etp - 1) * before).unsqueeze(1) + copy * length_P[block].unsqueeze(1)
    row = row.where((expert < count_E.numel()).unsqueeze(1), rows)

    slot = torch.empty_like(row)
    slot[order] = row
    entry = order.new_full((rows + 1,), expert.numel())
    entry[row] = order.unsqueeze(1).expand_as(row)
    return entry[:rows], slot


@named("permute")
def copy_rows(
    x_TD: Tensor, weights_TK: Tensor, entry_R: Tensor, slot: Tensor, kernels: str = "auto", packed: bool = False
) -> tuple[Tensor, Tensor | None, Route]:
    """The rows of the buffer, (R, D), copied from x; their routing weights, (R, 1), unless the rows are packed with
    them; and the route."""
    T, K = weights_TK.shape
    route = Route(entry_R // K, slot.view(T, K * slot.shape[1]))
    if packed:
        return to_packed_rows(x_TD, weights_TK, entry_R, route.slot_TJ), None, route
    return *to_weighted_rows(x_TD, weights_TK, entry_R, route.slot_TJ, kernels), route


def first_rows(x_RD: Tensor, rows: int) -> Tensor:
    """Return the first rows of a buffer, of which the others are unused."""
    if torch.compiler.is_compiling():  # their number is not known then
        return x_RD.narrow(0, 0, rows)
    rest = x_RD.shape[0] - rows
    return x_RD.split([rows, rest])[0] if rest else x_RD  # so that backward need not copy


def cut(route: Route, rows: int) -> Route:
    """The route of a buffer's first rows, if no token has others."""
    if not torch.compiler.is_compiling() and rows == len(route.source_R):
        return route
    return Route(route.source_R.narrow(0, 0, rows), route.slot_TJ.clamp(max=rows))


@named("permute")
def assign_all_rows(
    chosen_TK: Tensor, num_experts: int, ep: int, etp: int, kernels: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """`assign_rows` into the largest buffer possible, T * K * etp rows, unused ones last; and each expert's count."""
    if fused(kernels, chosen_TK):
        from titanmoe.ops.kernels import choice_rows

        return choice_rows.assign_all_rows(chosen_TK, num_experts, ep, etp)
    order, count_E = sort_by_expert(chosen_TK, num_experts)
    return *assign_rows(chosen_TK, order, count_E, ep, etp, 0, chosen_TK.numel() * etp), count_E


@named("permute")
def by_expert(count_Ge: Tensor, rows: int, kernels: str = "auto") -> tuple[Tensor, Tensor]:
    """The order (and its inverse) that turns rows sorted by (sender, expert) into rows sorted by (expert, sender)."""
    if fused(kernels, count_Ge):
        from titanmoe.ops.kernels import choice_rows

        return choice_rows.regroup(count_Ge, rows)
    start_Ge = (count_Ge.flatten().cumsum(0) - count_Ge.flatten()).view_as(count_Ge)
    length = count_Ge.t().flatten()
    shift = start_Ge.t().flatten() - (length.cumsum(0) - length)
    order = torch.arange(rows, device=count_Ge.device) + shift.repeat_interleave(length, output_size=rows)
    return order, invert(order)
