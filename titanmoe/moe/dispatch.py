"""Rows to the ranks that hold their experts, and back. A dispatcher knows tokens and ranks, nothing of what experts do.

    rows, weights, counts, route = dispatcher.dispatch(x, weights, chosen, bin)
    y = dispatcher.combine(experts(rows, weights, counts), route)

Shapes: T tokens this rank owns, D model, K top-k, E experts, e local experts, G ranks of the dispatch group (ep x etp,
etp innermost), R rows this rank's experts work on. Expert number E stands for "no expert".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm import ALONE, Group, all_gather, all_to_all, gather, scatter_sum
from titanmoe.moe.permute import invert, reorder, to_rows, to_tokens


class Route(NamedTuple):
    """How combine finds the way back."""

    source_R: Tensor  # token of each row laid out at home
    slot_TJ: Tensor  # rows of each token
    regroup: tuple[Tensor, Tensor] | None = None  # order (and inverse) from by-sender to by-expert
    send: list[int] | None = None
    receive: list[int] | None = None


class _Dispatcher:
    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.lay(ALONE, 1, 1)

    def lay(self, group: Group, ep: int, etp: int) -> None:
        """Over which ranks the experts lie; called when the model is laid on the meshes."""
        self.group, self.ep, self.etp = group, ep, etp
        self.local_experts = self.num_experts // ep


class AllToAll(_Dispatcher):
    """Each token travels to its experts' ranks and to no other: one all-to-all there, one back.

    A row goes to all etp ranks of its expert in the same all-to-all. Each returns its share of the down projection, and
    the sum over top-k at home adds those shares too: expert tensor parallelism costs no collective of its own.
    Per rank and direction: T*K*etp rows of D elements, less the rows that stay.
    """

    def dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin: int
    ) -> tuple[Tensor, Tensor, Tensor, Route]:
        """bin: rows per expert and sender where bins are padded to a static size, else 0."""
        order, count_E = sort_by_expert(chosen_TK, self.num_experts)
        if bin:
            send = receive = None
            rows = self.num_experts * self.etp * bin
            count_Ge = count_E.new_full((self.group.size, self.local_experts), bin)
        else:
            send_Ge = count_E.view(self.ep, 1, -1).expand(-1, self.etp, -1).flatten(0, 1)
            count_Ge = all_to_all(send_Ge, self.group)
            # The layer's one host sync: how many rows go where.
            send, receive = torch.stack((send_Ge.sum(1), count_Ge.sum(1))).tolist()
            rows = sum(send)
        entry_R, slot = lay_out(chosen_TK, order, count_E, self.ep, self.etp, bin, rows)
        x, weights, route = copy_rows(x_TD, weights_TK, entry_R, slot)
        x, weights = (all_to_all(rows, self.group, send, receive) for rows in (x, weights))
        regroup = None
        if self.group.size > 1 and self.local_experts > 1:
            regroup = by_expert(count_Ge, x.shape[0])
            x, weights = (reorder(rows, *regroup) for rows in (x, weights))
        return x, weights, count_Ge.sum(0), route._replace(regroup=regroup, send=send, receive=receive)

    def combine(self, y_RD: Tensor, route: Route) -> Tensor:
        if route.regroup is not None:
            y_RD = reorder(y_RD, *reversed(route.regroup))
        return to_tokens(all_to_all(y_RD, self.group, route.receive, route.send), route.source_R, route.slot_TJ)


class AllGather(_Dispatcher):
    """Every rank of ep x etp sees every token of the group and picks what its experts want; the sums scatter back.

    Per rank and direction: T * (G - 1) rows of D elements whatever top_k is, in even pieces. Fits a group of two or so,
    or top_k near ep.
    """

    def dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin: int
    ) -> tuple[Tensor, Tensor, Tensor, Route]:
        x_ND, weights_NK = gather(x_TD, 0, self.group), gather(weights_TK, 0, self.group)
        # Numbered from this rank's first expert; to this rank all others are no expert.
        chosen_NK = all_gather(chosen_TK, 0, self.group) - self.group.rank // self.etp * self.local_experts
        mine = (chosen_NK >= 0) & (chosen_NK < self.local_experts)
        chosen_NK = chosen_NK.where(mine, self.local_experts)
        order, count_e = sort_by_expert(chosen_NK, self.local_experts)
        bin *= self.group.size
        rows = self.local_experts * bin if bin else int(count_e.sum())  # the layer's one host sync
        entry_R, slot = lay_out(chosen_NK, order, count_e, 1, 1, bin, rows)
        x, weights, route = copy_rows(x_ND, weights_NK, entry_R, slot)
        return x, weights, torch.full_like(count_e, bin) if bin else count_e, route

    def combine(self, y_RD: Tensor, route: Route) -> Tensor:
        return scatter_sum(to_tokens(y_RD, route.source_R, route.slot_TJ), 0, self.group)


def sort_by_expert(chosen_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Entries (token * K + slot) by expert and then by token, those without expert last; and each expert's count."""
    flat = chosen_TK.flatten()
    count = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), count[:num_experts]


def lay_out(
    chosen_TK: Tensor, order: Tensor, count_E: Tensor, ep: int, etp: int, bin: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Place every entry's etp copies in a buffer of `rows`: blocks by rank (ep outer, etp inner), in a block by expert,
    in an expert by token; experts follow each other closely, or every `bin` rows.

    Returns the entry of each row (T*K for an empty row) and the rows of each entry, (T*K, etp) (`rows` for no expert).
    """
    expert = chosen_TK.flatten()[order]
    place = torch.arange(expert.numel(), device=order.device)
    if bin:
        # from place in the sorted order to place in bins
        start_E = F.pad(count_E.cumsum(0), (1, 0))
        place = place - start_E[expert] + expert * bin
        length_P = count_E.new_full((ep,), count_E.numel() // ep * bin)
    else:
        length_P = count_E.view(ep, -1).sum(1)
    block = (expert // (count_E.numel() // ep)).clamp(max=ep - 1)
    before = (length_P.cumsum(0) - length_P)[block]  # rows of earlier blocks, each of which is there etp times
    copy = torch.arange(etp, device=order.device)
    row = (place + (etp - 1) * before).unsqueeze(1) + copy * length_P[block].unsqueeze(1)
    row = row.where((expert < count_E.numel()).unsqueeze(1), rows)

    slot = torch.empty_like(row)
    slot[order] = row
    entry = order.new_full((rows + 1,), expert.numel())
    entry[row] = order.unsqueeze(1).expand_as(row)
    return entry[:rows], slot


def copy_rows(x_TD: Tensor, weights_TK: Tensor, entry_R: Tensor, slot: Tensor) -> tuple[Tensor, Tensor, Route]:
    """The rows of x, (R, D), and of the routing weights, (R, 1)."""
    T, K = weights_TK.shape
    route = Route(entry_R // K, slot.view(T, K * slot.shape[1]))
    x = to_rows(x_TD, route.source_R, route.slot_TJ)
    return x, to_rows(weights_TK.reshape(T * K, 1), entry_R, slot), route


def by_expert(count_Ge: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order (and its inverse) that turns rows sorted by (sender, expert) into rows sorted by (expert, sender)."""
    start_Ge = (count_Ge.flatten().cumsum(0) - count_Ge.flatten()).view_as(count_Ge)
    length = count_Ge.t().flatten()
    shift = start_Ge.t().flatten() - (length.cumsum(0) - length)
    order = torch.arange(rows, device=count_Ge.device) + shift.repeat_interleave(length, output_size=rows)
    return order, invert(order)
