"""Pipeline schedules without torch: ranks of stages, schedules in files, bubbles, and the laws of schedules.

A schedule is a row of cells for each pipeline rank. A cell is what the rank computes at one time: nothing, one
action, or two that overlap. Used by `titanmoe.parallel.pipeline`, the planner and the laws.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

from titanmoe.config.schema import Config, Pipeline


@dataclass(frozen=True)
class Schedule:
    """The properties of a named pipeline schedule, such as "1F1B"."""

    stages_per_rank: int  # unless [pipeline] virtual_stages says otherwise
    v_shape: bool = False  # the second half of the stages is on the ranks in reverse
    zero_bubble: bool = False  # backward is split into input and weight gradients


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
    """One computation of a stage for one microbatch: its forward, its backward, or one half of its backward."""

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

    Raises ValueError if the file is not a schedule, and OSError if it cannot be read.
    """
    with open(path, newline="") as file:
        return [[parse_cell(text) for text in row] for row in csv.reader(file) if row]


def stage_ranks(options: Pipeline, pp: int) -> list[int]:
    """Return the pipeline rank that runs each stage, in the order of stages.

    Args:
        options: the recipe's [pipeline], which does not count without a pipeline.
        pp: the number of pipeline ranks.
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

    A table in pipeline.schedule_csv counts in place of the named schedule. False without a pipeline.
    """
    if pp == 1:
        return False
    if not options.schedule_csv:
        return SCHEDULES[options.schedule].zero_bubble
    return any(action.does == "W" for row in read_csv(options.schedule_csv) for cell in row for action in cell)


def single_order(schedule: str, pp: int, microbatches: int) -> list[list[Cell]]:
    """Return the cells of each pipeline rank under GPipe or 1F1B, which have one stage per rank.

    A cell has the actions that a rank computes at one time, here one. torch has no such table for GPipe, and the one it
    has for 1F1B is shifted.
    """
    rows = []
    for rank in range(pp):
        warmup = microbatches if schedule == "GPipe" else min(microbatches, pp - rank)
        forward = [(Action(rank, "F", m),) for m in range(microbatches)]
        backward = [(Action(rank, "B", m),) for m in range(microbatches)]
        rows.append(alternate(forward, backward, warmup))
    return rows


def alternate(forward: list[Cell], backward: list[Cell], warmup: int) -> list[Cell]:
    """Return a rank's cells: `warmup` forward cells, then backward and forward in turn, then the remaining backward."""
    steady = [cell for pair in zip(backward, forward[warmup:], strict=False) for cell in pair]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]


def result_of(action: Action) -> tuple[int, str, int]:
    """Return (stage, kind, microbatch) of the result that others wait for.

    A full backward also delivers the input gradient that the stage before it waits for.
    """
    return action.stage, "I" if action.does == "B" else action.does, action.microbatch


def inputs_of(action: Action, stages: int, shared: bool = False) -> list[tuple[int, str, int]]:
    """Return (stage, kind, microbatch) of the results that an action waits for in a pipeline of so many stages.

    Args:
        action: a forward, a backward or one half of it, or a pass of the vocabulary.
        stages: the number of stages.
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


def bubble(
    rows: Sequence[Sequence[Cell]], stages: int, stage_costs: Sequence[float] = (), loss_cost: float = 0.0
) -> float:
    """Simulate a schedule; return the fraction of all ranks' time that is idle.

    Two overlapping actions start when both can run and send their results when both are done, as in torch. A pass of
    the vocabulary has its result when all ranks have run it.

    Args:
        rows: the cells of each pipeline rank, in the order in which it runs them.
        stages: the number of stages.
        stage_costs: time of each stage's forward; other actions take as many times that as COST says. () for 1 each.
        loss_cost: time of the loss of a microbatch, forward and backward, where all stages share the vocabulary.

    Raises:
        ValueError: if the schedule deadlocks.
    """
    idle, _ = simulate(rows, stages, stage_costs, loss_cost)
    return idle


def simulate(
    rows: Sequence[Sequence[Cell]], stages: int, stage_costs: Sequence[float] = (), loss_cost: float = 0.0
) -> tuple[float, float]:
    """Simulate a schedule; return the fraction of all ranks' time that is idle, and the time until the last rank ends.

    Times are in units of `stage_costs`. Arguments are those of `bubble`, and so is the ValueError for a deadlock.
    """
    queues, costs = [[cell for cell in row if cell] for row in rows], stage_costs or [1.0] * stages
    finished_at: dict[tuple[int, str, int], float] = {}
    passed: defaultdict[Action, list[float]] = defaultdict(list)
    clock, busy = [0.0] * len(queues), 0.0
    own_stages = [{action.stage for cell in queue for action in cell if action.does in COST} for queue in queues]
    shared = any(map(is_pass, queues[0]))

    def ready(rank: int, cell: Cell) -> float | None:
        own = {result_of(action) for action in cell}
        inputs = [
            need
            for action in cell
            # Only the rank of the stage waits for what it sends to the others.
            if action.does not in "HLD" or action.stage in own_stages[rank]
            for need in inputs_of(action, stages, shared)
            if need not in own or need[0] != action.stage
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


# ---- laws


def schedule_violations(config: Config, pp: int, dp: int, microbatches: int) -> list[str]:
    """Return a message for each reason why the recipe's pipeline schedule cannot run; [] if it can or if pp = 1.

    Args:
        config: the recipe.
        pp: the number of pipeline ranks.
        dp: the number of data ranks.
        microbatches: the number of microbatches of a step.
    """
    options = config.pipeline
    if pp == 1:
        return []
    samples = config.training.local_batch_size * dp
    problems, rows = [], []
    if options.schedule_csv:
        try:
            rows = read_csv(options.schedule_csv)
        except OSError as error:
            return [f"pipeline.schedule_csv = {options.schedule_csv!r} cannot be read: {error.strerror}"]
        except ValueError as error:
            return [f"pipeline.schedule_csv = {options.schedule_csv!r} is not a schedule: {error}"]
        problems += _csv_violations(options.schedule_csv, rows, pp, microbatches, samples)
    else:
        problems += _named_violations(config, pp, microbatches, samples)
    if config.moe.overlap == "pairs":
        problems += _overlap_violations(config, rows)
    if problems:
        return problems
    stages = len(stage_ranks(config.pipeline, pp))
    explicit = options.layers_per_stage
    if explicit and (
        len(explicit) != stages or sum(explicit) != config.model.num_layers or min(explicit[1:-1], default=1) < 1
    ):
        problems.append(
            f"pipeline.layers_per_stage = {explicit} must name {stages} stages that sum to model.num_layers = "
            f"{config.model.num_layers}, inner ones with at least one layer"
        )
    elif not explicit and stages > config.model.num_layers:
        problems.append(
            f"{stages} pipeline stages are too many for model.num_layers = {config.model.num_layers}: lower "
            "parallelism.pp or pipeline.virtual_stages"
        )
    if splits_backward(config.pipeline, pp) and config.parallelism.reshard_after_forward == "always":
        problems.append(
            f"pipeline.schedule = {options.schedule} splits backward in two, which loses gradients when weights are "
            "freed in between: set parallelism.reshard_after_forward to auto or never"
        )
    return problems


def _named_violations(config: Config, pp: int, microbatches: int, samples: int) -> Iterator[str]:
    """Yield a message for each reason why a schedule that is chosen by name cannot run.

    Args:
        config: the recipe.
        pp: the number of pipeline ranks.
        microbatches: the number of microbatches of a step.
        samples: the samples of one microbatch over all data ranks.
    """
    name, virtual = config.pipeline.schedule, config.pipeline.virtual_stages
    if name in SINGLE and virtual not in (-1, 1):
        yield (
            f"pipeline.schedule = {name} has one stage per rank, but virtual_stages is {virtual}: use 1, or "
            "Interleaved1F1B"
        )
    if SCHEDULES[name].v_shape and virtual not in (-1, 2):
        yield f"pipeline.schedule = {name} has 2 stages per rank, but virtual_stages is {virtual}: use 2"
    least = {"1F1B": pp, "DualPipeV": 2 * pp}.get(name, 1)
    rounds = max(1, microbatches // pp)
    if microbatches < least:
        yield (
            f"pipeline.schedule = {name} on {pp} ranks needs at least {least} microbatches, but the step has "
            f"{microbatches}: raise training.global_batch_size to {least * samples} or lower training.local_batch_size"
        )
    elif name.startswith("Interleaved") and microbatches % rounds:
        yield (
            f"pipeline.schedule = {name} on {pp} ranks needs microbatches in full rounds: {microbatches} is not a "
            f"multiple of {rounds}; set training.global_batch_size to {microbatches // pp * pp * samples}"
        )


def _csv_violations(path: str, rows: list[list[Cell]], pp: int, microbatches: int, samples: int) -> list[str]:
    """Return a message for each reason why a schedule from a file cannot run.

    Args:
        path: the file, for messages.
        rows: the cells of each pipeline rank.
        pp: the number of pipeline ranks.
        microbatches: the number of microbatches of a step.
        samples: the samples of one microbatch over all data ranks.
    """
    problems = []
    if len(rows) != pp:
        problems.append(f"{path} has {len(rows)} rows and needs one per pipeline rank: parallelism.pp is {pp}")
    actions = [(rank, action) for rank, row in enumerate(rows) for cell in row for action in cell]
    stages = sorted({action.stage for _, action in actions})
    if not stages or stages != list(range(len(stages))):
        return [*problems, f"{path} names the stages {stages}: number them from 0 without a gap"]
    file_microbatches = 1 + max(action.microbatch for _, action in actions)
    if file_microbatches != microbatches:
        problems.append(
            f"{path} runs {file_microbatches} microbatches, but the step has {microbatches}: set "
            f"training.global_batch_size to {file_microbatches * samples}"
        )
    for stage in stages:
        own = [(rank, action) for rank, action in actions if action.stage == stage]
        if len({rank for rank, _ in own}) > 1:
            problems.append(f"{path} has stage {stage} on ranks {sorted({rank for rank, _ in own})}: put it on one")
        for m in range(file_microbatches):
            does = sorted(action.does for _, action in own if action.microbatch == m)
            if does not in (["B", "F"], ["F", "I", "W"]):
                problems.append(
                    f"{path}: stage {stage} does {does} on microbatch {m}; it must do F and B, or F, I and W"
                )
    if not problems:
        try:
            bubble(rows, len(stages))
        except ValueError as error:
            problems.append(f"{path} cannot run: {error}")
    return problems


PAIRS = 'moe.overlap = "pairs"'


def _overlap_violations(config: Config, rows: list[list[Cell]]) -> Iterator[str]:
    """Yield a message for each reason why moe.overlap = "pairs" cannot run with the schedule.

    Args:
        config: the recipe.
        rows: the cells of each pipeline rank, if the schedule is from a file; else empty.
    """
    options = config.pipeline
    name = options.schedule_csv or options.schedule
    pairs = [cell for row in rows for cell in row if len(cell) == 2]
    if not pairs and name != "DualPipeV":
        yield (
            f"{PAIRS} runs pairs of a forward and a backward, and {name} has none: set pipeline.schedule = DualPipeV, "
            'name a pipeline.schedule_csv that has actions such as "(0F4;3B1)OVERLAP_F_B", or set moe.overlap = "none"'
        )
    for pair in pairs:
        if sorted(action.does for action in pair) != ["B", "F"] or pair[0].stage == pair[1].stage:
            yield (
                f"{PAIRS} needs pairs of F and B of two stages, but {name} has "
                f'"({";".join(map(str, pair))})OVERLAP_F_B": pair other actions, or set moe.overlap = "none"'
            )


def pair_violations(config: Config, pp: int, ep: int, etp: int) -> Iterator[str]:
    """Yield a message if moe.overlap = "pairs" has no messages to hide, because ep * etp = 1."""
    if pp > 1 and config.moe.overlap == "pairs" and ep * etp == 1:
        yield (
            f"{PAIRS} hides the dispatch of tokens to other ranks, but with ep * etp = 1 there is none: set "
            'parallelism.experts.ep above 1, or moe.overlap = "none"'
        )
