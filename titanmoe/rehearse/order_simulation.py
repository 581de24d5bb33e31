"""Simulation of the hosts and communicators of all ranks, which finds messages that wait for each other forever.

A communicator runs its operations one at a time, in the order in which its host issued them, and the sends and receives
of one batch together; an operation starts once its inputs exist, that is, after everything that earlier computation has
waited for; a host that reads a number waits for the computation. NCCL has no receive from any source, so no order
depends on which message arrives first, and one simulation is enough. No rank waits for members of a group that were not
rehearsed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from titanmoe.rehearse.message_recorder import Message
from titanmoe.rehearse.rank_program import POINT_TO_POINT, Communicator, Program, describe


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


class OrderSimulation:
    """A simulation of the hosts and communicators of all ranks, which runs until no rank can go on."""

    def __init__(self, programs: Iterable[Program], blocking: bool):
        """Run the simulation until no rank can go on.

        `blocking` says whether every call blocks its host until it completes.
        """
        self.blocking = blocking
        self.ranks = {program.rank: _Rank(program) for program in programs}
        self.arrived: dict[tuple, list[_Call]] = defaultdict(list)
        runnable = deque(self.ranks.values())
        while runnable:
            self._advance(runnable.popleft(), runnable)

    def blocked_operations(self) -> list[str]:
        """Return a sentence for each operation in a cycle of waiting ranks; [] if all ranks reach the step's end.

        If no ranks wait in a cycle, the operations are those of a chain, of which each waits for the next.
        """
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
        """Put one batch of messages as one call into the queue of its communicator on a simulated rank.

        Sends and receives with ranks outside the communicator are left out.

        Args:
            state: the rank that issues them; it is changed.
            numbers: indices of the messages in the rank's log, all in one communicator.
        """
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
