"""Kernels that assign slots of the send buffer to choices, and order what arrived by expert.

References: `assign_unpadded_slots` and `order_by_expert` in `titanmoe.moe.send_slots`. Choices are sorted by expert
and, within one, by token. They are counted in blocks of consecutive choices; cumulative sums of the counts, by expert
and then by block, say where a block's choices for an expert begin. No sort and no atomics: each number is written once.

Shapes: T tokens, K choices of a token, N = T * K choices, E experts (P: rounded up to a power of two), G ranks, e local
experts, J = G * e.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import cdiv, expert_tile, kernel, next_power_of_2

TILE = 8192
"""The pairs of a choice and an expert that a program compares."""
STEP = 1024
"""The slots that a program writes at a time."""


@triton.jit(do_not_specialize=["N", "BLOCKS"])
def _count_choices(chosen, count, N, BLOCKS, E: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    block = tl.program_id(0)
    n, e = block * ROWS + tl.arange(0, ROWS), tl.arange(0, P)
    expert = tl.load(chosen + n, mask=n < N, other=E)
    total = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(count + e * BLOCKS + block, total, mask=e < E)


@triton.jit(do_not_specialize=["N", "BLOCKS"])
def _assign_rows(chosen, ends, entry, slot, count, N, BLOCKS, E: tl.constexpr, P: tl.constexpr, HELD: tl.constexpr,
           ETP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    n, e = block * ROWS + tl.arange(0, ROWS), tl.arange(0, P)
    in_range = n < N
    expert = tl.load(chosen + n, mask=in_range, other=E)
    real = expert < E
    real_expert = tl.where(real, expert, 0).to(tl.int32)
    here = (expert[:, None] == e[None, :]).to(tl.int32)
    within = tl.sum(here * (tl.cumsum(here, 0) - here), 1)
    # In the order of (expert, block), the entry before says where this one begins.
    before = real_expert * BLOCKS + block - 1
    place = within + tl.load(ends + before, mask=real & (before >= 0), other=0)
    first = real_expert // HELD * HELD * BLOCKS - 1  # the last entry before the experts of the same rank
    begin = tl.load(ends + first, mask=real & (first >= 0), other=0)
    length = tl.load(ends + first + HELD * BLOCKS, mask=real, other=0) - begin
    # Choices of no expert come last, in their own order.
    upto = e * BLOCKS + block - 1
    start = tl.load(ends + e * BLOCKS - 1, mask=(e > 0) & (e < E), other=0)
    earlier = tl.sum(tl.load(ends + upto, mask=(e < E) & (upto >= 0), other=0) - start, 0)
    none = (in_range & (expert >= E)).to(tl.int32)
    unused = tl.load(ends + E * BLOCKS - 1) + block * ROWS - earlier + tl.cumsum(none, 0) - none
    for copy in tl.static_range(ETP):
        row = tl.where(real, place + (ETP - 1) * begin + copy * length, unused * ETP + copy)
        tl.store(entry + row, tl.where(real, n, N).to(tl.int64), mask=in_range)
        tl.store(slot + n.to(tl.int64) * ETP + copy, tl.where(real, row, N * ETP).to(tl.int64), mask=in_range)
    if block == 0:
        total = tl.load(ends + (e + 1) * BLOCKS - 1, mask=e < E, other=0)
        tl.store(count + e, (total - start).to(tl.int64), mask=e < E)


@triton.jit
def _regroup_rows(count, order, inverse, J: tl.constexpr, EXPERTS: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr):
    group = tl.program_id(0)
    expert, sender = group % EXPERTS, group // EXPERTS
    j = tl.arange(0, P)
    size = tl.load(count + j, mask=j < J, other=0)
    source = tl.sum(tl.where(j < group, size, 0), 0)
    earlier = (j % EXPERTS < expert) | ((j % EXPERTS == expert) & (j // EXPERTS < sender))
    target = tl.sum(tl.where(earlier, size, 0), 0)
    rows = tl.load(count + group)
    for first in range(0, rows, STEP):
        r = first + tl.arange(0, STEP)
        tl.store(order + target + r, source + r, mask=r < rows)
        tl.store(inverse + source + r, target + r, mask=r < rows)


def launch_constants(experts: int) -> dict[str, int]:
    """Return the kernels' constants by name, for this number of experts: E, P and ROWS, the choices of a program."""
    return expert_tile(experts, TILE, min_rows=16)


def number_of_blocks(choices: int, experts: int) -> int:
    """Return the number of blocks of consecutive choices, one per program; more experts, smaller and more blocks."""
    return cdiv(choices, launch_constants(experts)["ROWS"])


@kernel("titanmoe::count_choices")
def count_choices(chosen_N: Tensor, experts: int) -> Tensor:
    """Count the choices of each expert in each block of consecutive choices: (E, `number_of_blocks`), int32.

    Args:
        chosen_N: the chosen expert of each choice; E, no expert, is not counted.
        experts: E.
    """
    N = len(chosen_N)
    programs = number_of_blocks(N, experts)
    count = torch.empty(experts, programs, dtype=torch.int32, device=chosen_N.device)
    if N:
        _count_choices[(programs,)](chosen_N.contiguous(), count, N, programs, **launch_constants(experts), num_warps=8)
    return count


@count_choices.register_fake
def _(chosen_N, experts):
    return chosen_N.new_empty(experts, number_of_blocks(len(chosen_N), experts), dtype=torch.int32)


@kernel("titanmoe::assign_choices")
def assign_choices(chosen_N: Tensor, ends: Tensor, experts: int, ep: int, etp: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assign slots of a send buffer to choices, without padding.

    Args:
        chosen_N: the chosen expert of each choice; E for no expert.
        ends: inclusive cumulative sums of `count_choices`, flattened first: (E * blocks,), int32.
        experts: E.
        ep: the number of ranks among which the experts are divided.
        etp: the number of ranks that share each expert.

    Returns:
        The choice in each slot (N * etp,), N in an unused one; the slots of each choice (N, etp), N * etp for no
        expert; and the number of choices of each expert (E,). Slots are in the order of ep rank, etp rank, expert
        and token; unused ones come last.
    """
    N, long = len(chosen_N), {"dtype": torch.int64, "device": chosen_N.device}
    entry, slot = torch.empty(N * etp, **long), torch.empty(N, etp, **long)
    count = torch.empty(experts, **long) if N else torch.zeros(experts, **long)
    programs = number_of_blocks(N, experts)
    if N:
        _assign_rows[(programs,)](
            chosen_N.contiguous(), ends, entry, slot, count, N, programs, **launch_constants(experts),
            HELD=experts // ep, ETP=etp, num_warps=8,
        )  # fmt: skip
    return entry, slot, count


@assign_choices.register_fake
def _(chosen_N, ends, experts, ep, etp):
    N = len(chosen_N)
    return tuple(chosen_N.new_empty(shape, dtype=torch.int64) for shape in ((N * etp,), (N, etp), (experts,)))


@kernel("titanmoe::regroup")
def regroup(count_Ge: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return, by a kernel, the permutation that sorts received routed tokens by expert, then sender; and its inverse.

    Args:
        count_Ge: the number of routed tokens from each sender for each local expert.
        rows: the sum of these numbers.

    Returns:
        Two int64 tensors (rows,): received[first] is sorted, and sorted[second] is in the order of arrival.
    """
    order, inverse = (torch.empty(rows, dtype=torch.int64, device=count_Ge.device) for _ in range(2))
    J = count_Ge.numel()
    if rows:
        _regroup_rows[(J,)](
            count_Ge.contiguous(), order, inverse, J=J, EXPERTS=count_Ge.shape[1], P=next_power_of_2(J),
            STEP=STEP, num_warps=4,
        )  # fmt: skip
    return order, inverse


@regroup.register_fake
def _(count_Ge, rows):
    return tuple(count_Ge.new_empty(rows, dtype=torch.int64) for _ in range(2))


def assign_unpadded_slots(chosen_TK: Tensor, experts: int, ep: int, etp: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assign slots of a send buffer to choices without padding, by two kernels.

    Args:
        chosen_TK: each token's chosen experts; E for no expert.
        experts: E.
        ep: the number of ranks among which the experts are divided.
        etp: the number of ranks that share each expert.

    Returns:
        The choice in each slot (T * K * etp,), T * K in an unused one; the slots of each choice (T * K, etp),
        T * K * etp for no expert; and the number of choices of each expert (E,). Slots are in the order of ep rank,
        etp rank, expert and token; unused ones come last.
    """
    chosen_N = chosen_TK.flatten()
    ends = count_choices(chosen_N, experts).flatten().cumsum(0, dtype=torch.int32)
    return assign_choices(chosen_N, ends, experts, ep, etp)
