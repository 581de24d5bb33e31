"""Check that the messages of all ranks can complete: who issues what in which order, and who waits for whom.

`check_order` asks: Do all ranks make the same groups in the same order? Do all members of a group issue the same
collectives in the same order, with matching dtypes and sizes? Does every send have a receive of its size? Does every
rank wait for all its messages? Do the ranks of a stage run the same program, where not all of them were rehearsed? Does
every rank reach the end? The last is answered by simulating the ranks (titanmoe.rehearse.order_simulation), twice:

    safe in host order                 every operation blocks the rank that issues it until it completes
    safe only if streams overlap       operations of different communicators must be able to run side by side
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

from titanmoe.rehearse.message_recorder import ALL_TO_ALLS, Event, Message
from titanmoe.rehearse.order_simulation import OrderSimulation
from titanmoe.rehearse.rank_program import POINT_TO_POINT, Communicator, Program, describe, ranks_text

HOST_ORDER, STREAMS = "safe in host order", "safe only if streams overlap"
MOST = 8
"""The most errors that are reported, because one often causes many."""


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
        equal_pairs: Pairs of programs that must issue the same messages, each in its own groups.

    Returns:
        A verdict whose text is HOST_ORDER or STREAMS if they can, else the first error; errors do not raise. Ranks are
        simulated only if the comparisons find no error. At most MOST (8) errors are returned.
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
    blocked = OrderSimulation(programs, blocking=True).blocked_operations()
    if not blocked:
        return Verdict(HOST_ORDER, True)
    with_streams = OrderSimulation(programs, blocking=False).blocked_operations()
    if not with_streams:
        return Verdict(STREAMS, True, tuple(blocked))
    return Verdict("ranks wait for each other in a cycle", False, tuple(with_streams))


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
    return f"{kind} over ranks {' | '.join(map(ranks_text, groups[:4]))}{more}"


# ---- members of a group


def message_mismatches(programs: list[Program]) -> Iterator[str]:
    """Yield error messages where members of a group do not issue matching collectives, or sends and receives.

    Only rehearsed members are compared. If one issues nothing in a group with collectives, only that is reported.
    """
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
    """Yield an error message for the first member of a group whose collectives differ from those of member 0.

    Order, operation, dtype, layer, pass and size are compared. If no member differs, yield one for each all-to-all
    whose split sizes do not match between sender and receiver.

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
            also = f", as on rank{'s' * (len(agreeing) > 1)} {ranks_text(agreeing)}" if agreeing else ""
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
    """Return the index of the first collective in which two ranks of a group differ; None if all match.

    If another line of code issues an earlier message, its index is returned, because there the ranks diverge. If one
    rank only issues more messages, the index is the length of the shorter list.
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
    """Yield one error message, for the first pair of members whose sends and receives differ in number or size.

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
    """Yield an error message for the first pair of ranks that must issue the same messages and do not.

    Their waits and host syncs must have the same order too. Split sizes and the groups' ranks are not compared.
    """
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
