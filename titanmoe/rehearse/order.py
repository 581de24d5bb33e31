"""Whether the messages of all ranks can complete: who issues what in which order, and who waits for whom.

Three questions, in this order. Do all members of a group issue the same collectives in the same order, with matching
dtypes and sizes? Does every send have a receive of its size? Does every rank reach the end? The last is answered by
simulating the ranks. A communicator runs its operations one at a time, in the order in which its host issued them, and
the sends and receives of one batch together; an operation starts once its inputs exist, that is, after everything that
earlier computation has waited for; a host that reads a number waits for the computation. There are two simulations:

    safe in host order                 every operation blocks the rank that issues it until it completes
    safe only if streams overlap       operations of different communicators must be able to run side by side

NCCL has no receive from any source, so nothing depends on which message arrives first: following one run is enough.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from titanmoe.rehearse.record import ALL_TO_ALLS, Log, Message

HOST_ORDER, STREAMS = "safe in host order", "safe only if streams overlap"
POINT_TO_POINT = ("send", "receive")
Comm = tuple[str, tuple[int, ...]]
"""A communicator: its lane and its ranks."""


@dataclass(frozen=True)
class Program:
    """The operations that a rank issues and waits for."""

    rank: int
    log: Log
    comms: dict[str, Comm]
    """By torch's name for the group, as in the log."""
    exact: bool = True
    """False for a rank that represents others: their split sizes may differ."""

    def comm(self, message: Message) -> Comm:
        return self.comms[message.group]


@dataclass(frozen=True)
class Verdict:
    text: str
    """HOST_ORDER, STREAMS, or the error."""
    safe: bool
    concerned: tuple[str, ...] = ()
    """Operations that wait for each other."""


def check(programs: list[Program]) -> Verdict:
    wrong = next(disagreements(programs), None)
    if wrong is not None:
        return Verdict(wrong, False)
    stuck = _Simulation(programs, blocking=True).stuck()
    if not stuck:
        return Verdict(HOST_ORDER, True)
    with_streams = _Simulation(programs, blocking=False).stuck()
    if not with_streams:
        return Verdict(STREAMS, True, tuple(stuck))
    return Verdict("ranks wait for each other in a cycle", False, tuple(with_streams))


def describe(program: Program, message: Message, number: int | None = None) -> str:
    lane, ranks = program.comm(message)
    of = f" {number}" if number is not None else ""
    layer = f" of {message.line.layer}" if message.line.layer else ""
    phase = " in backward" if message.backward else ""
    who = f" with rank {ranks[message.peer]}" if message.op in POINT_TO_POINT else ""
    count = f"{message.sent or message.received} bytes of {str(message.dtype).removeprefix('torch.')}"
    return (
        f"rank {program.rank}: operation{of} of {lane} over ranks {_few(ranks)}: {message.op}{who}, {count}, "
        f"{message.line}{layer}{phase}"
    )


def _few(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"


# ---- agreement


def disagreements(programs: list[Program]) -> Iterator[str]:
    by_comm: dict[Comm, list[tuple[Program, list[Message]]]] = defaultdict(list)
    for program in programs:
        mine: dict[Comm, list[Message]] = defaultdict(list)
        for message in program.log.messages:
            mine[program.comm(message)].append(message)
        for comm, messages in mine.items():
            by_comm[comm].append((program, messages))
    for comm, members in by_comm.items():
        present = {program.rank for program, _ in members}
        absent = [rank for rank in comm[1] if rank not in present]
        if absent:
            program, messages = members[0]
            yield f"{describe(program, messages[0], 0)}; rank {absent[0]} never issues any operation of that group"
            continue
        yield from _collectives(members)
        yield from _pairs(members)


def _collectives(members: list[tuple[Program, list[Message]]]) -> Iterator[str]:
    lists = [(program, [m for m in messages if m.op not in POINT_TO_POINT]) for program, messages in members]
    first, mine = lists[0]
    for program, theirs in lists[1:]:
        for number, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if _agreed(a) != _agreed(b):
                yield f"{describe(first, a, number)}; {describe(program, b, number)}"
                return
        if len(mine) != len(theirs):
            number = min(len(mine), len(theirs))
            more, messages, less = (first, mine, program) if len(mine) > number else (program, theirs, first)
            yield f"{describe(more, messages[number], number)}; rank {less.rank} never issues operation {number}"
            return
    exact = [(program, messages) for program, messages in lists if program.exact]
    for number, message in enumerate(mine):
        if message.op in ALL_TO_ALLS:
            yield from _splits(exact, number)


def _agreed(message: Message) -> tuple:
    sizes = () if message.op in ALL_TO_ALLS else (message.sent, message.received)
    return message.op, message.dtype, *sizes


def _splits(members: list[tuple[Program, list[Message]]], number: int) -> Iterator[str]:
    """Each rank sends as many rows as its receiver expects."""
    for program, messages in members:
        a = messages[number]
        ranks = program.comm(a)[1]
        me = ranks.index(program.rank)
        for other, theirs in members:
            b, you = theirs[number], ranks.index(other.rank)
            if a.splits[0][you] != b.splits[1][me]:
                yield (
                    f"{describe(program, a, number)}, sends rank {other.rank} {a.splits[0][you]} rows; "
                    f"{describe(other, b, number)}, expects {b.splits[1][me]}"
                )
                return


def _pairs(members: list[tuple[Program, list[Message]]]) -> Iterator[str]:
    by_ends: dict[tuple[int, int], dict[str, list[tuple[Program, Message]]]] = defaultdict(lambda: defaultdict(list))
    for program, messages in members:
        for message in messages:
            if message.op in POINT_TO_POINT:
                other = program.comm(message)[1][message.peer]
                ends = (program.rank, other) if message.op == "send" else (other, program.rank)
                by_ends[ends][message.op].append((program, message))
    for (source, target), found in by_ends.items():
        sends, receives = found["send"], found["receive"]
        for number, ((p, a), (q, b)) in enumerate(zip(sends, receives, strict=False)):
            if (a.dtype, a.sent) != (b.dtype, b.received):
                yield f"{describe(p, a, number)}; {describe(q, b, number)}"
                return
        if len(sends) != len(receives):
            number = min(len(sends), len(receives))
            program, message = max(sends, receives, key=len)[number]
            less = target if program.rank == source else source
            yield f"{describe(program, message, number)}; rank {less} never issues its side"
            return


# ---- progress


@dataclass(eq=False)
class _Unit:
    """What one rank gives a communicator in one call: a collective, or a batch of sends and receives."""

    rank: int
    comm: Comm
    messages: list[Message]
    keys: list[tuple]
    needs: int
    """How many of the rank's waits must be over before it can start."""
    active: bool = False
    left: int = 0

    @property
    def done(self) -> bool:
        return self.active and not self.left


@dataclass(eq=False)
class _Rank:
    program: Program
    at: int = 0  # the next event
    passed: int = 0  # waits that are over
    waits: list[_Unit] = field(default_factory=list)
    units: dict[int, _Unit] = field(default_factory=dict)  # by message
    queues: dict[Comm, deque[_Unit]] = field(default_factory=lambda: defaultdict(deque))
    counts: dict[tuple, int] = field(default_factory=lambda: defaultdict(int))
    last: _Unit | None = None


class _Simulation:
    def __init__(self, programs: Iterable[Program], blocking: bool):
        self.blocking = blocking
        self.ranks = {program.rank: _Rank(program) for program in programs}
        self.arrived: dict[tuple, list[_Unit]] = defaultdict(list)
        runnable = deque(self.ranks.values())
        while runnable:
            self._go(runnable.popleft(), runnable)

    def stuck(self) -> list[str]:
        """Operations that wait for each other in a cycle, or else a chain of waits; empty if all ranks finished."""
        waiting = {rank: unit for rank, state in self.ranks.items() if (unit := self._waits(state)) is not None}
        if not waiting:
            return []
        rank, chain = next(iter(waiting)), []
        while rank in waiting and rank not in chain:
            chain.append(rank)
            rank = next((other for other in self._missing(waiting[rank]) if other in waiting), -1)
        cycle = chain[chain.index(rank) :] if rank in chain else chain
        return [describe(self.ranks[r].program, waiting[r].messages[0]) for r in cycle]

    def _waits(self, state: _Rank) -> _Unit | None:
        for queue in state.queues.values():
            if queue and queue[0].active:
                return queue[0]
        return next((queue[0] for queue in state.queues.values() if queue), None)

    def _missing(self, unit: _Unit) -> Iterator[int]:
        """Ranks that have not started the operation that this one waits for."""
        for key in unit.keys:
            present = {other.rank for other in self.arrived[key]}
            yield from (rank for rank in (key[-2:] if key[0] == "pair" else unit.comm[1]) if rank not in present)

    def _go(self, state: _Rank, runnable: deque[_Rank]) -> None:
        events, messages = state.program.log.events, state.program.log.messages
        moved = True
        while moved:
            moved = False
            while state.passed < len(state.waits) and state.waits[state.passed].done:
                state.passed += 1
            for queue in state.queues.values():
                while queue and queue[0].done:
                    queue.popleft()
                if queue and not queue[0].active and queue[0].needs <= state.passed:
                    self._begin(queue[0], runnable)
                    moved = True
            if state.at == len(events) or (self.blocking and state.last is not None and not state.last.done):
                continue
            kind, number = events[state.at]
            if kind == "sync":
                if state.passed < len(state.waits):
                    continue
                state.at += 1
            elif kind == "wait":
                state.waits.append(state.units[number])
                state.at += 1
            else:
                numbers = [number]
                batch = messages[number].batch
                while batch >= 0 and state.at + len(numbers) < len(events):
                    kind, following = events[state.at + len(numbers)]
                    if kind != "issue" or messages[following].batch != batch:
                        break
                    numbers.append(following)
                state.at += len(numbers)
                self._issue(state, numbers)
            moved = True

    def _issue(self, state: _Rank, numbers: list[int]) -> None:
        program = state.program
        messages = [program.log.messages[number] for number in numbers]
        comm, keys = program.comm(messages[0]), []
        for message in messages:
            if message.op in POINT_TO_POINT:
                other = comm[1][message.peer]
                ends = (program.rank, other) if message.op == "send" else (other, program.rank)
                pair = message.op, comm, *ends
                count = state.counts[pair]
                state.counts[pair] += 1
                keys.append(("pair", comm, count, *ends))
            else:
                keys.append(("all", comm, state.counts[comm]))
                state.counts[comm] += 1
        unit = _Unit(program.rank, comm, messages, keys, 0 if self.blocking else len(state.waits))
        state.queues[comm].append(unit)
        state.units |= dict.fromkeys(numbers, unit)
        state.last = unit

    def _begin(self, unit: _Unit, runnable: deque[_Rank]) -> None:
        unit.active, unit.left = True, len(unit.keys)
        for key in unit.keys:
            units = self.arrived[key]
            units.append(unit)
            if len(units) == (2 if key[0] == "pair" else len(unit.comm[1])):
                for one in units:
                    one.left -= 1
                    if not one.left and one.rank != unit.rank:
                        runnable.append(self.ranks[one.rank])
