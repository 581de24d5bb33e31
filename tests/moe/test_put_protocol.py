"""An exchange through symmetric memory under all interleavings of its ranks, by a search of all states.

Every rank's part is what `exchange_steps` does, with the places that `places` computes. A step is a kernel: its threads
run in any order, the next one starts when all have ended. A barrier is torch's (CUDASymmetricMemory.cu, barrier_kernel,
main): for each peer, set its flag of this rank once that is 0, then reset this rank's flag of the peer once that is 1,
with release and acquire. So memory is as if accesses were in one order, as it is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from titanmoe.comm.collectives import Group
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.moe.dispatchers.symmetric_buffers import exchange_steps
from titanmoe.moe.dispatchers.symmetric_places import places

LIMIT, ROWS, ROOM = 40, 4, 32
OVERWRITTEN, UNWRITTEN = "a row is overwritten before it is read", "a row is read before it is written"
STUCK = "no rank can go on"
Step = str
Kernel = tuple[tuple[tuple[Any, ...], ...], ...]
"""The actions of its threads."""
Program = list[list[Kernel]]
"""Of each rank: the kernels of its stream."""
Steps = Callable[[Callable, Callable, Callable], Any]


def tables(counts: list[list[int]], rank: int) -> tuple[Tensor, Tensor]:
    ranks = ExpertRanks(Group("group", len(counts), rank), len(counts), 1)
    return places(torch.tensor(counts), ranks, LIMIT, ROWS, ROOM)[:2]


def kernel(step: Step, rank: int, ranks: int, n: int, to_N: Tensor, from_M: Tensor, reset: bool) -> Kernel:
    """A step of exchange number n. reset: False plants a barrier whose flags stay set."""
    if step == "barrier":
        first, second = ("set", "reset") if reset else ("set again", "see")
        return tuple(((first, other, rank), (second, rank, other)) for other in range(ranks) if other != rank)
    if step == "put":
        rows = enumerate(to_N.tolist())
        return tuple((("write", place, (n, rank * LIMIT + row)),) for row, place in rows if place >= 0)
    rows = enumerate(from_M.tolist())
    return tuple((("read", rank * LIMIT + row, (n, source)),) for row, source in rows if source >= 0)


def programs(exchanges: Sequence[list[list[int]]], steps: Steps = exchange_steps, reset: bool = True) -> Program:
    """Every exchange there and then back, in the same buffer."""
    order: list[Step] = []
    steps(*(partial(order.append, name) for name in ("barrier", "put", "take")))
    ranks, out = len(exchanges[0]), []
    for rank in range(ranks):
        both = [tables(counts, rank) for counts in exchanges]
        ways = [way for to_S, from_R in both for way in ((to_S, from_R), (from_R, to_S))]
        kernels = [kernel(step, rank, ranks, n, *way, reset) for n, way in enumerate(ways) for step in order]
        out.append([threads for threads in kernels if threads])
    return out


def faults(program: Program) -> set[str]:
    """What goes wrong in some interleaving."""
    found: set[str] = set()
    # Of each rank: the kernel, and how far each of its threads is. Flags that are set. What is where, and unread.
    start = tuple((0, (0,) * len(kernels[0])) for kernels in program), frozenset(), frozenset(), frozenset()
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        after = set(moves(program, state, found))
        if not after and any(at < len(kernels) for (at, _), kernels in zip(state[0], program, strict=True)):
            found.add(STUCK)
        stack += (new := after - seen)
        seen |= new
    return found


def moves(program: Program, state: tuple, found: set[str]) -> Iterator[tuple]:
    """The states after one more action of any thread that can go on."""
    positions, *rest = state
    for rank, (at, done) in enumerate(positions):
        for thread, place in enumerate(done):
            if place == len(program[rank][at][thread]):
                continue
            changed = act(*program[rank][at][thread][place], *rest, found)
            if changed is None:
                continue
            now = at, (*done[:thread], place + 1, *done[thread + 1 :])
            if all(i == len(actions) for i, actions in zip(now[1], program[rank][at], strict=True)):
                now = at + 1, (0,) * len(program[rank][at + 1] if at + 1 < len(program[rank]) else ())
            yield (*positions[:rank], now, *positions[rank + 1 :]), *changed


def act(action: str, *what: Any) -> tuple | None:
    """The flags, and what is where and unread; None while it has to wait."""
    *where, flags, memory, unread, found = what
    if action == "write":
        row, content = where
        if any(other == row for other, _ in unread):
            found.add(OVERWRITTEN)
        memory, unread = (frozenset(x for x in rows if x[0] != row) | {(row, content)} for rows in (memory, unread))
    elif action == "read":
        if tuple(where) not in memory:
            found.add(UNWRITTEN)
        unread -= {tuple(where)}
    elif (action == "set") == (tuple(where) in flags) and action != "set again":
        return None
    elif action != "see":
        flags = flags - {tuple(where)} if action == "reset" else flags | {tuple(where)}
    return flags, memory, unread


# By sender: rows for each expert.
EVEN = [[1, 1], [1, 1]]
FIRST_EMPTY = [[0, 1], [0, 1]]
TO_ONE = [[2, 0], [1, 0]]
NOTHING = [[0, 0], [0, 0]]
SEVERAL = [[0, 1, 0, 1], [1, 0, 1, 0]]
THREE = [[0, 1, 0], [1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    "exchanges",
    [[EVEN, EVEN], [FIRST_EMPTY, TO_ONE, EVEN], [TO_ONE, NOTHING, FIRST_EMPTY], [SEVERAL, SEVERAL], [THREE]],
    ids=["even", "first piece empty", "nothing in between", "several experts", "three ranks"],
)
def test_every_row_is_read_once_and_after_it_is_written(exchanges: list) -> None:
    assert faults(programs(exchanges)) == set()


def without_first(barrier: Callable, put: Callable, take: Callable) -> None:
    put()
    barrier()
    take()


def without_second(barrier: Callable, put: Callable, take: Callable) -> None:
    barrier()
    put()
    take()


def signal_before_write(barrier: Callable, put: Callable, take: Callable) -> None:
    barrier()
    barrier()
    put()
    take()


@pytest.mark.parametrize(
    "steps, reset, fault",
    [
        (without_first, True, OVERWRITTEN),
        (without_second, True, UNWRITTEN),
        (signal_before_write, True, UNWRITTEN),
        (exchange_steps, False, OVERWRITTEN),
    ],
    ids=["no barrier before reuse", "none after writing", "signal before writing", "flags are not reset"],
)
def test_a_fault_in_the_protocol_is_found(steps: Steps, reset: bool, fault: str) -> None:
    assert fault in faults(programs([EVEN, EVEN], steps, reset))


def test_a_rank_that_leaves_out_a_barrier_is_found() -> None:
    program = programs([EVEN, EVEN])
    del program[1][0]
    assert STUCK in faults(program)


def test_what_is_written_is_each_row_once() -> None:
    """Places are a permutation, and the way back is the inverse."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(3, (4, 8), generator=generator)
    counts[1] = 0
    rows, room, limit = 24, 96, 120
    all_to, all_from = [], []
    for rank in range(4):
        ranks = ExpertRanks(Group("group", 4, rank), 2, 2)
        to_S, from_R, *_ = places(counts, ranks, limit, 2 * rows, room)
        all_to.append(torch.nn.functional.pad(to_S, (0, limit - len(to_S)), value=-1))
        all_from.append(torch.nn.functional.pad(from_R, (0, limit - len(from_R)), value=-1))
    to, back = torch.cat(all_to), torch.cat(all_from)
    sent = (to >= 0).nonzero().flatten()
    assert len(sent) == 2 * counts.sum() == (back >= 0).sum()
    assert torch.equal(back[to[sent]], sent)
