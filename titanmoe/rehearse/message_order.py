"""Check that the messages of all ranks can complete: who issues what in which order, and who waits for whom.

`check_order` asks: Do all ranks make the same groups in the same order? Do all members of a group issue the same
collectives in the same order, with matching dtypes and sizes? Does every send have a receive of its size? Does every
rank wait for all its messages? Do the ranks of a stage run the same program, where not all of them were rehearsed? Does
every rank reach the end? The last is answered by simulating the ranks. A communicator runs its operations one at a
time, in the order in which its host issued them, and the sends and receives of one batch together; an operation starts
once its inputs exist, that is, after everything that earlier computation has waited for; a host that reads a number
waits for the computation. There are two simulations:

    safe in host order                 every operation blocks the rank that issues it until it completes
    safe only if streams overlap       operations of different communicators must be able to run side by side

NCCL has no receive from any source, so no order depends on which message arrives first: one simulation of each kind is
enough. No rank waits for members of a group that were not rehearsed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from titanmoe.rehearse.message_recorder import ALL_TO_ALLS, Event, Log, Message

HOST_ORDER, STREAMS = "safe in host order", "safe only if streams overlap"
POINT_TO_POINT = ("send", "receive")
MOST = 8
"""The most errors that are reported, because one often causes many."""
CreatedGroups = list[tuple[str, tuple[tuple[int, ...], ...]]]
"""The kind and the ranks of all groups that a world makes together, in order."""


class Communicator(NamedTuple):
    """A process group as the check of message order sees it."""

    kind: str
    """The communicator kind and the axes of the group, as text."""
    ranks: tuple[int, ...]
    """All ranks of the group."""
    members: tuple[int, ...]
    """The ranks of the group that were rehearsed."""


@dataclass(frozen=True)
class Program:
    """The messages that one rank issues and waits for in a step, and the groups that it creates."""

    rank: int
    log: Log
    comms: dict[str, Communicator]
    """The communicators by torch's name for the group, as in the log."""
    created_groups: CreatedGroups = field(default_factory=list)

    def comm(self, message: Message) -> Communicator:
        return self.comms[message.group]

    def peer(self, message: Message) -> int:
        """Return the rank at the other end of a send or receive of this program, a rank of the world."""
        return self.comm(message).ranks[message.peer]


@dataclass(frozen=True)
class Verdict:
    """Whether the messages of all ranks can complete, and the reason."""

    text: str
    """HOST_ORDER, STREAMS, or the first error."""
    safe: bool
    """Whether all messages can complete."""
    details: tuple[str, ...] = ()
    """The operations that wait for each other, or further errors."""


def check_order(programs: list[Program], equal_pairs: Iterable[tuple[Program, Program]] = ()) -> Verdict:
    """Return whether the messages of these ranks can all complete, by comparing and simulating them.

    Args:
        programs: The programs of the rehearsed ranks.
        equal_pairs: Pairs of ranks that must issue the same messages, each in its own groups.
    """
    errors_by_rule = (
        group_mismatches(programs),
        message_mismatches(programs),
        unwaited_messages(programs),
        program_differences(equal_pairs),
    )
    errors = list(islice(chain(*errors_by_rule), MOST))
    if errors:
        return Verdict(errors[0], False, tuple(errors[1:]))
    blocked = _Simulation(programs, blocking=True).blocked_operations()
    if not blocked:
        return Verdict(HOST_ORDER, True)
    with_streams = _Simulation(programs, blocking=False).blocked_operations()
    if not with_streams:
        return Verdict(STREAMS, True, tuple(blocked))
    return Verdict("ranks wait for each other in a cycle", False, tuple(with_streams))


def describe(program: Program, message: Message, number: int | None = None) -> str:
    """Return a sentence about a message for errors: rank, communicator, operation, size and line of code.

    Args:
        program: The program that issues the message.
        message: The message.
        number: The index of the message among those of its communicator; None to leave it out.
    """
    comm = program.comm(message)
    number_text = f" {number}" if number is not None else ""
    layer = f" of {message.site.layer}" if message.site.layer else ""
    phase = " in backward" if message.backward else ""
    peer_text = f" with rank {program.peer(message)}" if message.op in POINT_TO_POINT else ""
    rows = f" in rows of {message.row_bytes}" if message.op in ALL_TO_ALLS else ""
    size = message.sent_bytes or message.received_bytes
    count = f"{size} bytes of {str(message.dtype).removeprefix('torch.')}{rows}"
    return (
        f"rank {program.rank}: operation{number_text} of {comm.kind} over ranks {_ranks_text(comm.ranks)}: "
        f"{message.op}{peer_text}, {count}, {message.site}{layer}{phase}"
    )


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"


# ---- groups


def group_mismatches(programs: list[Program]) -> Iterator[str]:
    """Yield an error message if two ranks do not create the same process groups in the same order.

    All ranks of the world must create every group together, members or not.
    """
    first = programs[0]
    for program in programs[1:]:
        for number, (a, b) in enumerate(zip_longest(first.created_groups, program.created_groups)):
            if a != b:
                yield (
                    f"rank {first.rank} makes {_group_text(a)}, and rank {program.rank} {_group_text(b)} as number "
                    f"{number} of its groups: all ranks of a world have to make the same groups in the same order"
                )
                return


def _group_text(group: tuple[str, tuple[tuple[int, ...], ...]] | None) -> str:
    if group is None:
        return "no group"
    kind, groups = group
    more = f" and {len(groups) - 4} more" if len(groups) > 4 else ""
    return f"{kind} over ranks {' | '.join(map(_ranks_text, groups[:4]))}{more}"


# ---- members of a group


def message_mismatches(programs: list[Program]) -> Iterator[str]:
    """Yield error messages where members of a group do not issue matching collectives, or sends and receives."""
    by_comm: dict[Communicator, list[tuple[Program, list[Message]]]] = defaultdict(list)
    for program in programs:
        by_comm_of_rank: dict[Communicator, list[Message]] = defaultdict(list)
        for message in program.log.messages:
            by_comm_of_rank[program.comm(message)].append(message)
        for comm, messages in by_comm_of_rank.items():
            by_comm[comm].append((program, messages))
    for comm, members in by_comm.items():
        present = {program.rank for program, _ in members}
        absent = [rank for rank in comm.members if rank not in present]
        # A group of sends and receives alone may have members that do neither, such as the ends of a pipeline.
        if absent and any(m.op not in POINT_TO_POINT for _, messages in members for m in messages):
            program, messages = members[0]
            yield f"{describe(program, messages[0], 0)}; rank {absent[0]} never issues any operation of that group"
            continue
        yield from _collective_mismatches(members)
        yield from _pair_mismatches(members)


def _collective_mismatches(members: list[tuple[Program, list[Message]]]) -> Iterator[str]:
    """Yield error messages where the collectives of a group's members differ in order, type or size.

    Args:
        members: Each member of one group with its messages in that group.
    """
    lists = [(program, [m for m in messages if m.op not in POINT_TO_POINT]) for program, messages in members]
    first, own_messages = lists[0]
    for program, other_messages in lists[1:]:
        number = _first_difference(own_messages, other_messages)
        if number is None:
            continue
        if number < min(len(own_messages), len(other_messages)):
            a, b = own_messages[number], other_messages[number]
            counts = (
                ""
                if len(own_messages) == len(other_messages)
                else f" ({len(own_messages)} and {len(other_messages)} operations in all)"
            )
            agreeing = tuple(
                other.rank
                for other, messages_of_other in lists
                if other is not program
                and number < len(messages_of_other)
                and _signature(messages_of_other[number]) == _signature(b)
            )
            also = f", as on rank{'s' * (len(agreeing) > 1)} {_ranks_text(agreeing)}" if agreeing else ""
            yield f"{describe(first, a, number)}; {describe(program, b, number)}{also}{counts}"
        else:
            more, messages, less = (
                (first, own_messages, program) if len(own_messages) > number else (program, other_messages, first)
            )
            yield f"{describe(more, messages[number], number)}; rank {less.rank} never issues operation {number}"
        return
    for number, message in enumerate(own_messages):
        if message.op in ALL_TO_ALLS:
            yield from _split_mismatches(lists, number)


def _first_difference(own_messages: list[Message], other_messages: list[Message]) -> int | None:
    """Return the index of the first message in which two ranks differ; None if their messages match.

    If another line of code issues an earlier message, its index is returned, because there the ranks diverge.
    """
    pairs = list(zip(own_messages, other_messages, strict=False))
    if len(own_messages) == len(other_messages) and all(_signature(a) == _signature(b) for a, b in pairs):
        return None
    differing = (i for i, (a, b) in enumerate(pairs) if a.site != b.site or _signature(a) != _signature(b))
    return next(differing, len(pairs))


def _signature(message: Message) -> tuple:
    sizes = (message.row_bytes,) if message.op in ALL_TO_ALLS else (message.sent_bytes, message.received_bytes)
    return message.op, message.dtype, message.site.layer, message.backward, *sizes


def _split_mismatches(members: list[tuple[Program, list[Message]]], number: int) -> Iterator[str]:
    """Yield an error message if the split sizes of one all-to-all do not match between sender and receiver.

    Args:
        members: Each member of the group with its collectives.
        number: The index of the all-to-all in each member's collectives.
    """
    for program, messages in members:
        a = messages[number]
        ranks = program.comm(a).ranks
        own_index = ranks.index(program.rank)
        for other, other_messages in members:
            b, other_index = other_messages[number], ranks.index(other.rank)
            if a.splits[0][other_index] != b.splits[1][own_index]:
                yield (
                    f"{describe(program, a, number)}, sends rank {other.rank} {a.splits[0][other_index]} rows; "
                    f"{describe(other, b, number)}, expects {b.splits[1][own_index]}"
                )
                return


def _pair_mismatches(members: list[tuple[Program, list[Message]]]) -> Iterator[str]:
    """Yield an error message if the sends and receives between two members of a group do not match in number or size.

    Args:
        members: Each member of one group with its messages in that group.
    """
    by_ends: dict[tuple[int, int], dict[str, list[tuple[Program, Message]]]] = defaultdict(lambda: defaultdict(list))
    for program, messages in members:
        for message in messages:
            other = program.peer(message) if message.op in POINT_TO_POINT else -1
            if other in program.comm(message).members:
                ends = (program.rank, other) if message.op == "send" else (other, program.rank)
                by_ends[ends][message.op].append((program, message))
    for (source, target), by_op in by_ends.items():
        sends, receives = by_op["send"], by_op["receive"]
        for number, ((p, a), (q, b)) in enumerate(zip(sends, receives, strict=False)):
            if (a.dtype, a.sent_bytes) != (b.dtype, b.received_bytes):
                yield f"{describe(p, a, number)}; {describe(q, b, number)}"
                return
        if len(sends) != len(receives):
            number = min(len(sends), len(receives))
            program, message = max(sends, receives, key=len)[number]
            less = target if program.rank == source else source
            yield f"{describe(program, message, number)}; rank {less} never issues its side"
            return


def unwaited_messages(programs: list[Program]) -> Iterator[str]:
    """Yield an error for each message that is never waited for: its result may be used before it arrives."""
    for program in programs:
        waited = {event.number for event in program.log.events if event.kind == "wait"}
        for number, message in enumerate(program.log.messages):
            if number not in waited:
                yield f"{describe(program, message)}, which is never waited for"


def program_differences(equal_pairs: Iterable[tuple[Program, Program]]) -> Iterator[str]:
    """Yield an error message if two ranks that must issue the same messages do not."""
    for a, b in equal_pairs:
        for event, other_event in zip_longest(a.log.events, b.log.events):
            if event is None or other_event is None or _event_signature(a, event) != _event_signature(b, other_event):
                yield (
                    f"ranks {a.rank} and {b.rank} of a stage differ, so nothing is known of its ranks that were not "
                    f"rehearsed: {_event_text(a, event)}; {_event_text(b, other_event)}; --all-ranks rehearses them all"
                )
                return


def _event_signature(program: Program, event: Event) -> tuple:
    if event.kind != "issue":
        return event
    message = program.log.messages[event.number]
    return *_signature(message), program.comm(message).kind, message.peer, message.batch


def _event_text(program: Program, event: Event | None) -> str:
    if event is None:
        return f"rank {program.rank}: the end of its step"
    if event.kind == "sync":
        return f"rank {program.rank}: the host waits for the device, {program.log.syncs[event.number]}"
    text = describe(program, program.log.messages[event.number])
    return text if event.kind == "issue" else f"{text}, is waited for"


# ---- progress


@dataclass(eq=False)
class _Call:
    """One rank's side of a collective, or of a batch of sends and receives, in the simulation."""

    rank: int
    comm: Communicator
    messages: list[Message]
    keys: list[tuple]
    """The keys of the messages, which are equal on all ranks that take part in them."""
    needed_waits: int
    """The number of the rank's earlier waits that must have ended before the call can start."""
    active: bool = False
    """Whether it has started."""
    pending: int = 0
    """The number of messages that other ranks have not started yet."""

    @property
    def done(self) -> bool:
        return self.active and not self.pending


@dataclass(eq=False)
class _Rank:
    """The state of a simulated rank."""

    program: Program
    next_event: int = 0
    finished_waits: int = 0
    waits: list[_Call] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)  # by message
    queues: dict[Communicator, deque[_Call]] = field(default_factory=lambda: defaultdict(deque))
    counts: dict[tuple, int] = field(default_factory=lambda: defaultdict(int))
    last_call: _Call | None = None


class _Simulation:
    """A simulation of the hosts and communicators of all ranks, which runs until no rank can go on."""

    def __init__(self, programs: Iterable[Program], blocking: bool):
        """Run the simulation.

        Args:
            programs: The programs of the rehearsed ranks.
            blocking: Whether every call blocks its host until it completes.
        """
        self.blocking = blocking
        self.ranks = {program.rank: _Rank(program) for program in programs}
        self.arrived: dict[tuple, list[_Call]] = defaultdict(list)
        runnable = deque(self.ranks.values())
        while runnable:
            self._advance(runnable.popleft(), runnable)

    def blocked_operations(self) -> list[str]:
        """Return descriptions of operations that wait for each other; [] if all ranks reach the end of the step."""
        waiting = {rank: call for rank, state in self.ranks.items() if (call := self._waiting_call(state)) is not None}
        if not waiting:
            return []
        rank, chain = next(iter(waiting)), []
        while rank in waiting and rank not in chain:
            chain.append(rank)
            rank = next((other for other in self._missing_ranks(waiting[rank]) if other in waiting), -1)
        cycle = chain[chain.index(rank) :] if rank in chain else chain
        return [describe(self.ranks[r].program, waiting[r].messages[0]) for r in cycle]

    def _waiting_call(self, state: _Rank) -> _Call | None:
        for queue in state.queues.values():
            if queue and queue[0].active:
                return queue[0]
        return next((queue[0] for queue in state.queues.values() if queue), None)

    def _missing_ranks(self, call: _Call) -> Iterator[int]:
        """Yield the ranks that have not started their side of a call."""
        for key in call.keys:
            present = {other.rank for other in self.arrived[key]}
            yield from (rank for rank in (key[-2:] if key[0] == "pair" else call.comm.members) if rank not in present)

    def _advance(self, state: _Rank, runnable: deque[_Rank]) -> None:
        """Run one simulated rank until it is blocked, and append the ranks that it unblocks to `runnable`."""
        events, messages = state.program.log.events, state.program.log.messages
        progressed = True
        while progressed:
            progressed = False
            while state.finished_waits < len(state.waits) and state.waits[state.finished_waits].done:
                state.finished_waits += 1
            for queue in state.queues.values():
                while queue and queue[0].done:
                    queue.popleft()
                if queue and not queue[0].active and queue[0].needed_waits <= state.finished_waits:
                    self._start(queue[0], runnable)
                    progressed = True
            if state.next_event == len(events) or (
                self.blocking and state.last_call is not None and not state.last_call.done
            ):
                continue
            kind, number = events[state.next_event]
            if kind == "sync":
                if state.finished_waits < len(state.waits):
                    continue
                state.next_event += 1
            elif kind == "wait":
                state.waits.append(state.calls[number])
                state.next_event += 1
            else:
                numbers = [number]
                batch = messages[number].batch
                while batch >= 0 and state.next_event + len(numbers) < len(events):
                    kind, following = events[state.next_event + len(numbers)]
                    if kind != "issue" or messages[following].batch != batch:
                        break
                    numbers.append(following)
                state.next_event += len(numbers)
                self._issue(state, numbers)
            progressed = True

    def _issue(self, state: _Rank, numbers: list[int]) -> None:
        """Put the call of these messages, one batch, into the queue of its communicator."""
        program = state.program
        messages = [program.log.messages[number] for number in numbers]
        comm, keys = program.comm(messages[0]), []
        for message in messages:
            if message.op in POINT_TO_POINT:
                other = program.peer(message)
                if other not in comm.members:
                    continue
                ends = (program.rank, other) if message.op == "send" else (other, program.rank)
                pair = message.op, comm, *ends
                count = state.counts[pair]
                state.counts[pair] += 1
                keys.append(("pair", comm, count, *ends))
            else:
                keys.append(("all", comm, state.counts[comm]))
                state.counts[comm] += 1
        call = _Call(program.rank, comm, messages, keys, 0 if self.blocking else len(state.waits))
        state.queues[comm].append(call)
        state.calls |= dict.fromkeys(numbers, call)
        state.last_call = call

    def _start(self, call: _Call, runnable: deque[_Rank]) -> None:
        call.active, call.pending = True, len(call.keys)
        for key in call.keys:
            calls = self.arrived[key]
            calls.append(call)
            if len(calls) == (2 if key[0] == "pair" else len(call.comm.members)):
                for member in calls:
                    member.pending -= 1
                    if not member.pending and member.rank != call.rank:
                        runnable.append(self.ranks[member.rank])
