"""Pipeline schedules without torch: ranks of stages, schedules in files, and bubbles.

A schedule is a row of cells for each pipeline rank. A cell is what the rank computes at one time: nothing, one
action, or two that overlap. Used by `titanmoe.parallel.pipeline`, the planner and the laws
(titanmoe.fold.schedule_laws).
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

from titanmoe.config.schema import Pipeline


@dataclass(frozen=True)
class Schedule:
    """The properties of a named pipeline schedule, such as "1F1B"."""

    stages_per_rank: int
    """Number of stages of a rank unless `pipeline.virtual_stages` says otherwise."""
    v_shape: bool = False
    """Whether the second half of the stages is on the ranks in reverse order."""
    zero_bubble: bool = False
    """Whether backward is split into gradients of inputs and of weights."""


SCHEDULES = {
    "GPipe": Schedule(1),
    "1F1B": Schedule(1),
    "LoopedBFS": Schedule(2),
    "Interleaved1F1B": Schedule(2),
    "InterleavedZeroBubble": Schedule(2, zero_bubble=True),
    "ZBVZeroBubble": Schedule(2, v_shape=True, zero_bubble=True),
    "DualPipeV": Schedule(2, v_shape=True, zero_bubble=True),
}
SINGLE = ("GPipe", "1F1B")
COST = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Relative time of a forward, a full backward, and its gradients of inputs and of weights."""
PASSES = ("E", "H", "S", "L", "T", "D")
"""The passes of a vocabulary that all stages share (titanmoe.fold.vocabulary_passes)."""
PASS_COST = {"E": 0, "H": 0, "S": 1 / 3, "L": 0, "T": 2 / 3, "D": 0}
"""Time of each pass over that of a loss, forward and backward; lookups and messages count as none."""
_ACTION = re.compile(r"(\d+)(F|I|B|W)(\d+)")
_MESSAGE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")  # torch adds these itself
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One computation of a stage for a microbatch: forward, backward, one half of it, or a pass of the vocabulary."""

    stage: int
    does: str  # of COST or PASSES
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.does}{self.microbatch}"


Cell = tuple[Action, ...]


def parse_cell(text: str) -> Cell:
    """Parse a cell of a schedule's file, such as "0F0", "1B3" or "(0F4;3B1)OVERLAP_F_B", to its actions.

    Returns:
        One action, two that overlap, or none for an empty cell or one that only names a message.

    Raises:
        ValueError: if the text is no action.
    """
    text = text.strip()
    if pair := _PAIR.fullmatch(text):
        cell = tuple(action for part in pair[1].split(";") for action in parse_cell(part))
        if len(cell) != 2:
            raise ValueError(f"{text} does not overlap two computations")
        return cell
    if action := _ACTION.fullmatch(text):
        return (Action(int(action[1]), action[2], int(action[3])),)
    if text and not _MESSAGE.fullmatch(text):
        raise ValueError(f"{text!r:.60} is not an action, such as 0F0, 1B3 or (0F4;3B1)OVERLAP_F_B")
    return ()


def read_csv(path: str) -> list[list[Cell]]:
    """Read a schedule from a CSV file: for each pipeline rank the list of its cells.

    Raises ValueError if a cell cannot be parsed, and OSError if the file cannot be read. Whether the schedule is
    complete and can run is not checked (`titanmoe.fold.schedule_laws`).
    """
    with open(path, newline="") as file:
        try:
            return [[parse_cell(text) for text in row] for row in csv.reader(file) if row]
        except csv.Error as error:
            raise ValueError(f"it is not CSV: {error}") from None


def stage_ranks(options: Pipeline, pp: int) -> list[int]:
    """Return the pipeline rank that runs each stage, in the order of stages.

    Args:
        options: the recipe's [pipeline]; ignored if pp = 1, which has one stage.

    Raises:
        OSError: pipeline.schedule_csv cannot be read.
        ValueError: pipeline.schedule_csv has a cell that cannot be parsed.
    """
    if pp == 1:
        return [0]
    if options.schedule_csv:
        owner = {
            action.stage: rank
            for rank, row in enumerate(read_csv(options.schedule_csv))
            for cell in row
            for action in cell
        }
        return [owner[stage] for stage in range(len(owner))]
    schedule = SCHEDULES[options.schedule]
    virtual = schedule.stages_per_rank if options.virtual_stages == -1 else options.virtual_stages
    ranks = list(range(pp))
    if schedule.v_shape:
        return ranks + ranks[::-1]
    return ranks * virtual


def channels(ranks: Sequence[int]) -> dict[tuple[int, int], int]:
    """Assign process groups ("channels") to messages between pipeline ranks: {(source, target): number of the channel}.

    Pairs are the ranks of consecutive stages, in both directions; a rank sends itself nothing. Numbers start at 0.
    On one channel a rank sends to one other rank or receives from one, so that no message waits behind one in the other
    direction or to another rank. There are 2 channels for two ranks and 4 in most other cases.

    Args:
        ranks: the pipeline rank of each stage, in order.
    """
    numbers: dict[tuple[int, int], int] = {}
    taken: dict[int, set[int]] = defaultdict(set)
    for a, b in pairwise(ranks):
        for ends in ((a, b), (b, a)) if a != b else ():
            if ends not in numbers:
                number = next(n for n in count() if n not in taken[a] | taken[b])
                numbers[ends] = number
                taken[a].add(number)
                taken[b].add(number)
    return numbers


def splits_backward(options: Pipeline, pp: int) -> bool:
    """Return whether the schedule computes gradients of inputs and of weights in separate actions (zero bubble).

    False without a pipeline. If set, the file pipeline.schedule_csv decides: OSError or ValueError if it is unusable.
    """
    if pp == 1:
        return False
    if not options.schedule_csv:
        return SCHEDULES[options.schedule].zero_bubble
    return any(action.does == "W" for row in read_csv(options.schedule_csv) for cell in row for action in cell)


def single_order(schedule: str, pp: int, microbatches: int) -> list[list[Cell]]:
    """Return the cells of each pipeline rank under "GPipe" or "1F1B", which have one stage per rank.

    Each cell has one action. torch has no such table for GPipe, and the one it has for 1F1B is shifted.

    Args:
        schedule: "GPipe" or "1F1B".
    """
    rows = []
    for rank in range(pp):
        warmup = microbatches if schedule == "GPipe" else min(microbatches, pp - rank)
        forward = [(Action(rank, "F", m),) for m in range(microbatches)]
        backward = [(Action(rank, "B", m),) for m in range(microbatches)]
        rows.append(alternate(forward, backward, warmup))
    return rows


def alternate(forward: Sequence[Cell], backward: Sequence[Cell], warmup: int) -> list[Cell]:
    """Return a rank's cells: `warmup` forward cells, then backward and forward in turn, then the remaining backward."""
    steady = [cell for pair in zip(backward, forward[warmup:], strict=False) for cell in pair]
    return [*forward[:warmup], *steady, *backward[len(forward) - warmup :]]


def result_of(action: Action) -> tuple[int, str, int]:
    """Return (stage, kind, microbatch) of the result that others wait for; kind is what the action does.

    Of a full backward ("B") kind is "I": the input gradient that the stage before it waits for.
    """
    return action.stage, "I" if action.does == "B" else action.does, action.microbatch


def inputs_of(action: Action, stages: int, shared: bool = False) -> list[tuple[int, str, int]]:
    """Return (stage, kind, microbatch) of the results that an action waits for in a pipeline of so many stages.

    Args:
        action: a forward, a backward or one half of it, or a pass of the vocabulary.
        shared: whether all stages share the vocabulary.
    """
    stage, does, m = action
    last = stages - 1
    inputs = {
        "F": [(stage - 1, "F", m)] if stage else [(0, "E", m)] * shared,
        "W": [(stage, "I", m)],
        "E": [],
        "H": [(last, "F", m)],
        "S": [(last, "H", m)],
        "L": [(last, "S", m)],
        "T": [(last, "L", m)],
        "D": [(0, "I", m)],
    }
    gradient = [(stage + 1, "I", m)] if stage < last else [(last, "T", m)] * shared
    return inputs.get(does, [(stage, "F", m), *gradient])


def is_pass(cell: Cell) -> bool:
    """Return whether a cell is a pass of the vocabulary, which all ranks have."""
    return any(action.does in PASSES for action in cell)


def bubble(rows: Sequence[Sequence[Cell]], stages: int, loss_cost: float = 0.0) -> float:
    """Return the fraction of all ranks' time that is idle by `simulate`, if all stages cost the same.

    `loss_cost` is that of `simulate`, in forwards of a stage. Raises ValueError if the schedule deadlocks.
    """
    return simulate(rows, stages, loss_cost=loss_cost)[0]


def simulate(
    rows: Sequence[Sequence[Cell]], stages: int, stage_costs: Sequence[float] = (), loss_cost: float = 0.0
) -> tuple[float, float]:
    """Simulate a schedule; return the fraction of all ranks' time that is idle, and the time until the last rank ends.

    Two overlapping actions start when both can run and send their results when both are done, as in torch. A pass of
    the vocabulary has its result when all ranks have run it. Messages take no time.

    Args:
        rows: the cells of each pipeline rank, in the order in which it runs them.
        stage_costs: time of each stage's forward, in the unit of the second result; other actions take as many times
            that as COST says. () for 1 each.
        loss_cost: each rank's time for its slice of a microbatch's loss, forward and backward, where all stages share
            the vocabulary; not used otherwise.

    Raises:
        ValueError: if the schedule deadlocks.
    """
    queues, costs = [[cell for cell in row if cell] for row in rows], stage_costs or [1.0] * stages
    finished_at: dict[tuple[int, str, int], float] = {}
    passed: defaultdict[Action, list[float]] = defaultdict(list)
    clock, busy = [0.0] * len(queues), 0.0
    own_stages = [{action.stage for cell in queue for action in cell if action.does in COST} for queue in queues]
    shared = any(map(is_pass, queues[0]))

    def ready(rank: int, cell: Cell) -> float | None:
        results = {result_of(action) for action in cell}
        inputs = [
            need
            for action in cell
            # Only the rank of the stage waits for what it sends to the others.
            if action.does not in "HLD" or action.stage in own_stages[rank]
            for need in inputs_of(action, stages, shared)
            if need not in results or need[0] != action.stage
        ]
        return (
            max((finished_at[need] for need in inputs), default=0.0)
            if all(need in finished_at for need in inputs)
            else None
        )

    while any(queues):
        progressed = False
        for rank, queue in enumerate(queues):
            while queue and (start := ready(rank, queue[0])) is not None:
                cell = queue.pop(0)
                cost = sum(
                    loss_cost * PASS_COST[action.does]
                    if action.does in PASSES
                    else COST[action.does] * costs[action.stage]
                    for action in cell
                )
                clock[rank] = max(clock[rank], start) + cost
                busy += cost
                progressed = True
                if not is_pass(cell):
                    finished_at |= dict.fromkeys(map(result_of, cell), clock[rank])
                    continue
                passed[cell[0]].append(clock[rank])
                if len(passed[cell[0]]) == len(queues):
                    finished_at[cell[0]] = max(passed[cell[0]])
        if not progressed:
            raise ValueError("the schedule deadlocks")
    return 1 - busy / (len(clock) * max(clock)), max(clock)
