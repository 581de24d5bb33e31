"""Simulate how long a pipeline step takes, by how its messages are divided among communicators, and print a table.

    python scripts/pipeline_messages.py                      pp 8, with 7 and with 4 stages per rank
    python scripts/pipeline_messages.py --message 0.2        a message takes 0.2 of a stage's forward

A rank's messages are those of torch's runtime, in its order. On one communicator NCCL runs them one after the other, in
the order in which the host issued them, each after the computation that the host issued before it; a message starts
once both sides have reached it. A stage's forward takes 1, its backward 2 (or 1 for inputs and 1 for weights). The host
never delays a rank.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch.distributed.pipelining import schedules as torch_schedules

from titanmoe.config.schema import Pipeline
from titanmoe.fold.pipeline_schedules import COST, SCHEDULES, Action, Cell, channels, stage_ranks
from titanmoe.plan.schedule_cost import schedule_rows


class Message(NamedTuple):
    """A message of one microbatch between neighbouring stages, from rank `source` to rank `target`.

    It has the activations of `stage` if `forward`, else the gradients of its input.
    """

    forward: bool
    stage: int
    microbatch: int
    source: int
    target: int


Numbers = dict[tuple[int, int], int]
Communicator = Callable[[Message, Numbers], object]
COMMUNICATORS: dict[str, Communicator] = {
    "one": lambda message, _: 0,
    "for each direction": lambda message, _: message.forward,
    "for each neighbour": lambda message, _: frozenset((message.source, message.target)),
    "for each direction to each neighbour": lambda message, numbers: numbers[message.source, message.target],
}
"""Ways to choose a message's communicator, by name. Directions are those of activations and of gradients. The last is
the one that runs on GPUs, with the numbers of `titanmoe.fold.pipeline_schedules.channels`."""


class Event(NamedTuple):
    """An operation that a rank's host issues: a cell of the schedule, or, if that is (), its side of a message."""

    cell: Cell = ()
    message: Message | None = None


def insert_messages(rows: list[list[Cell]], ranks: list[int]) -> list[list[Event]]:
    """Return, by rank, what its host issues in order: cells of the schedule, and the messages that torch inserts.

    `rows` has the schedule's cells by rank, `ranks` the rank of each stage.
    """
    kind = torch_schedules._ComputationType
    of = {
        kind.SEND_F: (True, 0, 1),
        kind.RECV_F: (True, -1, 0),
        kind.SEND_B: (False, 0, -1),
        kind.RECV_B: (False, 1, 0),
    }

    def action(one: Action) -> torch_schedules._Action:
        return torch_schedules._Action(one.stage, kind(one.does), one.microbatch)

    def combine(cell: Cell) -> torch_schedules._Action:
        actions = tuple(map(action, cell))
        return actions[0] if len(actions) == 1 else torch_schedules._Action(-1, kind.OVERLAP_F_B, None, actions)

    actions = {rank: [combine(cell) for cell in row if cell] for rank, row in enumerate(rows)}
    table = torch_schedules._add_send_recv(actions, lambda stage: ranks[stage], len(ranks))

    def event(one: torch_schedules._Action) -> Event:
        if one.computation_type not in of:
            actions = one.sub_actions or (one,)
            return Event(tuple(Action(p.stage_index, p.computation_type.value, p.microbatch_index) for p in actions))
        forward, source, target = of[one.computation_type]
        ends = one.stage_index + source, one.stage_index + target
        return Event((), Message(forward, ends[0], one.microbatch_index, *(ranks[stage] for stage in ends)))

    return [[event(one) for one in table[rank]] for rank in range(len(rows))]


def step_time(
    rows: list[list[Event]], ranks: list[int], communicator: Callable[[Message], object], message_time: float
) -> float:
    """Simulate a step; return when the last rank has computed everything, in units of a stage's forward.

    Args:
        rows: what each rank's host issues in order.
        ranks: the rank of each stage.
        communicator: returns the communicator of a message; messages on one communicator follow each other.
        message_time: time of a message, in units of a stage's forward.

    Raises:
        ValueError: if the ranks wait for each other for ever.
    """
    computed: dict[int, list[float]] = {rank: [0.0] for rank in range(len(rows))}
    """End times of the computations that each rank's host has issued so far."""
    arrived: dict[Message, float] = {}
    waiting = [list(reversed(row)) for row in rows]
    queues: dict[tuple[int, object], list[tuple[Message, float]]] = defaultdict(list)
    free: dict[tuple[int, object], float] = defaultdict(float)

    def needs(cell: Cell, rank: int) -> list[Message]:
        """Return the messages from other ranks that a rank needs before it can compute a cell of its schedule."""
        needed = []
        for stage, does, m in cell:
            if does == "F" and stage and ranks[stage - 1] != rank:
                needed.append(Message(True, stage - 1, m, ranks[stage - 1], rank))
            if does in "BI" and stage < len(ranks) - 1 and ranks[stage + 1] != rank:
                needed.append(Message(False, stage + 1, m, ranks[stage + 1], rank))
        return needed

    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(waiting):
            while row:
                cell, message = row[-1]
                if message is None:
                    if any(need not in arrived for need in needs(cell, rank)):
                        break
                    start = max([computed[rank][-1], *(arrived[need] for need in needs(cell, rank))])
                    computed[rank].append(start + sum(COST[action.does] for action in cell))
                else:
                    queues[rank, communicator(message)].append((message, computed[rank][-1]))
                row.pop()
                progressed = True
        for (rank, name), queue in queues.items():
            while queue:
                message, ready = queue[0]
                other = message.target if rank == message.source else message.source
                other_queue = queues.get((other, name))
                if not other_queue or other_queue[0][0] != message:
                    break
                start = max(ready, other_queue[0][1], free[rank, name], free[other, name])
                arrived[message] = free[rank, name] = free[other, name] = start + message_time
                queue.pop(0)
                other_queue.pop(0)
                progressed = True
    if any(waiting) or any(queues.values()):
        raise ValueError("the schedule deadlocks")
    return max(times[-1] for times in computed.values())


def compare(schedule: str, pp: int, virtual: int, microbatches: int, message_time: float) -> dict[str, float]:
    """Return the time of a step by the name in COMMUNICATORS, in units of a stage's forward.

    `virtual` is the number of stages of each rank; `message_time` has the same unit as the result.
    """
    ranks = stage_ranks(Pipeline(schedule=schedule, virtual_stages=virtual), pp)
    rows = insert_messages(schedule_rows(schedule, pp, virtual, microbatches), ranks)
    numbers = channels(ranks)
    return {
        name: step_time(rows, ranks, lambda message, of=of: of(message, numbers), message_time)
        for name, of in COMMUNICATORS.items()
    }


def cases(stages: Iterable[int]) -> list[tuple[str, int]]:
    """Return (schedule, stages per rank) of each case: with each of `stages` where any is allowed."""
    several = [(name, v) for v in stages for name in ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS")]
    fixed = [(name, s.stages_per_rank) for name, s in SCHEDULES.items() if s.v_shape or s.stages_per_rank == 1]
    return several + fixed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--stages", type=int, nargs="*", default=[7, 4], help="per rank, where the schedule takes any")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--message", type=float, default=0.05, help="time of a message over that of a stage's forward")
    options = parser.parse_args()
    print(f"pp {options.pp}, {options.microbatches} microbatches, a message takes {options.message} of a forward")
    print("a step's time, over that of its computation, with communicators")
    print("| schedule | stages per rank |", *(f"{name} |" for name in COMMUNICATORS))
    print("|---|---|" + "---|" * len(COMMUNICATORS))
    for schedule, v in cases(options.stages):
        times = compare(schedule, options.pp, v, options.microbatches, options.message)
        busy = 3 * v * options.microbatches
        print(f"| {schedule} | {v} |", *(f"{time / busy:.3f} |" for time in times.values()))
