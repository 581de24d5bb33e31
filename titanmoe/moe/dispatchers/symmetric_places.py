"""Places of routed tokens in the buffers of the dispatcher `symm_mem`, computed from counts on the device.

All ranks of a dispatch group know how many routed tokens each has for each expert. From that a rank computes to which
slot of which rank's receive buffer each of its routed tokens goes, sorted by expert and then by sender, and from which
slot of which rank's send buffer each that arrives comes.

Shapes: E experts, e local experts, S slots of the send buffer, the unused ones last, R slots of the receive buffer:
every expert has a multiple of ALIGN. G ranks as senders, P the same ranks as receivers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.moe.dispatchers.dispatcher_spec import ALIGN


class Places(NamedTuple):
    """Source and destination of each routed token in the buffers of a dispatch group, as one rank sees them.

    A place is rank * limit + slot of that rank's buffer; -1 is nowhere.
    """

    to_S: Tensor
    """The place in a receive buffer to which each slot of this rank's send buffer goes."""
    from_R: Tensor
    """The place in a send buffer from which each slot of this rank's receive buffer comes."""
    slots_e: Tensor
    """The number of slots of each local expert in the receive buffer, a multiple of ALIGN."""
    fits: Tensor
    """Whether the routed tokens of every rank fit into its receive buffer, a scalar. If not, nothing is sent."""
    overflows: Tensor
    """Whether the routed tokens for this rank do not fit into its receive buffer, a scalar."""


def places(count_GE: Tensor, ranks: ExpertRanks, limit: int, send_slots: int, receive_slots: int) -> Places:
    """Compute where each routed token goes to and comes from in the buffers of a dispatch group.

    Runs on the device, without a host sync or a message. If any rank would receive too many, all places are -1, and
    each expert has ALIGN unused slots.

    Args:
        count_GE: the number of routed tokens from each sending rank for each expert.
        limit: the factor of the rank in a place, at least the slots of each buffer.
        send_slots: S, the slots of this rank's send buffer.
        receive_slots: R, the slots of this rank's receive buffer.
    """
    rank = ranks.group.rank
    # By sender, receiver and local expert: all etp ranks of an expert get its rows.
    size_GPe = count_GE.view(len(count_GE), ranks.ep, -1).repeat_interleave(ranks.etp, 1)
    need_P = aligned_counts(size_GPe.sum(0)).sum(1)
    fits = (need_P <= receive_slots).all()
    size_GPe = size_GPe * fits
    slots_Pe = aligned_counts(size_GPe.sum(0))
    first_GPe = (size_GPe.flatten(1).cumsum(1) - size_GPe.flatten(1)).view_as(size_GPe)  # in the send buffer
    place_GPe = slots_Pe.cumsum(1) - slots_Pe + size_GPe.cumsum(0) - size_GPe  # in the receive buffer
    begin_G1 = (torch.arange(len(count_GE), device=count_GE.device) * limit).unsqueeze(1)
    to_S = _counterparts(size_GPe[rank], first_GPe[rank], place_GPe[rank] + begin_G1, send_slots)
    size_eG, first_eG, place_eG = (x[:, rank].t() for x in (size_GPe, first_GPe, place_GPe))
    from_R = _counterparts(size_eG, place_eG, first_eG + begin_G1.t(), receive_slots)
    return Places(to_S, from_R, slots_Pe[rank], fits, need_P[rank] > receive_slots)


def _counterparts(size: Tensor, begin: Tensor, other: Tensor, rows: int) -> Tensor:
    """Map rows of a buffer to places by ranges: row begin[i] + j goes to place other[i] + j, for j < size[i].

    Args:
        size: the number of rows of each range; ranges ascend and do not overlap.
        begin: the first row of each range.
        other: the place that the first row of each range maps to; the others follow one by one.
        rows: the number of rows.

    Returns:
        The place of each of `rows` rows; -1 for a row in no range.
    """
    size, begin, other = (x.flatten() for x in (size, begin, other))
    row = torch.arange(rows, device=size.device)
    # The interval that ends behind the row; inductor searches no view, which `begin` may be.
    interval = torch.searchsorted(begin + size, row, right=True).clamp(max=len(begin) - 1)
    offset = row - begin[interval]
    return (other[interval] + offset).where((offset >= 0) & (offset < size[interval]), -1)


def aligned_counts(total: Tensor) -> Tensor:
    """Round counts of routed tokens up to a multiple of ALIGN, at least ALIGN: the slots of each expert's buffer."""
    return ((total + ALIGN - 1) // ALIGN * ALIGN).clamp(min=ALIGN)
