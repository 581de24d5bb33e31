"""Costs of a pipeline schedule, from its own table: how long ranks idle, and how many microbatches are in flight.

Called by the planner. Formulas replace tables of common schedules, short tables those of many microbatches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from titanmoe.fold.pipeline_schedules import SCHEDULES, SINGLE, Action, Cell, alternate, bubble, single_order
from titanmoe.fold.vocabulary_passes import EARLIER_FORWARDS, insert_passes, with_earlier_forwards

ROUNDS = 3
"""Microbatches per rank with which a table is evaluated: from 2 on, one more changes neither the idle time nor how many
are in flight."""
FORWARDS_FIRST = ("GPipe", "LoopedBFS")
"""Schedules that run every forward before the first backward."""


class BackwardLoad(NamedTuple):
    """Microbatches and gradients that the stages of a rank hold while one of them is in backward."""

    in_flight: tuple[float, ...]
    """Microbatches in flight in each stage of the rank, the one in backward included."""
    begun: tuple[bool, ...]
    """Whether each stage has gradients of an earlier microbatch."""

    def is_within(self, other: BackwardLoad) -> bool:
        """Return whether no stage holds more than in `other`."""
        return all(a <= b for a, b in zip(sum(self, ()), sum(other, ()), strict=True))


def schedule_rows(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> list[list[Cell]]:
    """Return each rank's cells of a pipeline schedule's table, in time order; () where a rank idles.

    Of "GPipe" and "1F1B" there are no idle cells. Stages are numbered over all ranks. Needs no process groups.
    """
    if schedule in SINGLE:
        return single_order(schedule, pp, microbatches)
    from torch.distributed.pipelining import schedules as torch_schedules

    kind = getattr(torch_schedules, f"Schedule{schedule}")
    torch_schedule = kind.__new__(kind)
    torch_schedule.pp_group_size, torch_schedule.n_local_stages = pp, stages_per_rank
    torch_schedule._n_microbatches = microbatches
    torch_schedule._stages = [None] * stages_per_rank
    torch_schedule.num_stages = torch_schedule._num_stages = pp * stages_per_rank
    torch_schedule.number_of_rounds = max(1, microbatches // pp)
    torch_schedule.microbatches_per_round = microbatches // torch_schedule.number_of_rounds
    rows = []
    for rank in range(pp):
        torch_schedule.rank = rank
        row = torch_schedule._calculate_single_rank_operations(rank)
        rows.append(
            [
                tuple(
                    Action(part.stage_index, part.computation_type.value, part.microbatch_index)
                    for part in (() if cell is None else cell.sub_actions or (cell,))
                )
                for cell in row
            ]
        )
    return rows


CHANGE = {"F": 1, "B": -1, "W": -1, "I": 0}
"""Microbatches that an action adds to those in flight."""


@lru_cache(maxsize=4096)
def schedule_idle(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> float:
    """Return the idle time of a schedule over the busy time of one microbatch: by formula, else by its table."""
    v = stages_per_rank
    if schedule in (*FORWARDS_FIRST, "1F1B") or (schedule == "Interleaved1F1B" and v > 1 and microbatches % pp == 0):
        return (pp - 1) / v
    if schedule == "DualPipeV" and microbatches >= 2 * pp:
        return (pp - 1) / 3
    m = _equivalent_microbatches(schedule, pp, microbatches)
    fraction = bubble(schedule_rows(schedule, pp, v, m), pp * v)
    return fraction / (1 - fraction) * m


@lru_cache(maxsize=4096)
def shared_idle(schedule: str, pp: int, stages_per_rank: int, microbatches: int, loss_cost: float) -> float:
    """Return the idle time of a schedule over the busy time of one microbatch, where all stages share the vocabulary.

    A rank may wait for others at every loss, so idle time may grow with the microbatches. It is simulated for few of
    them, and continued in a straight line.

    Args:
        loss_cost: time of a loss, in forwards of a stage.
    """

    def idle(m: int) -> float:
        rows = [[cell for cell in row if cell] for row in schedule_rows(schedule, pp, stages_per_rank, m)]
        stages = pp * stages_per_rank
        fraction = bubble(insert_passes(rows, stages), stages, loss_cost=loss_cost)
        return fraction / (1 - fraction) * m

    few = 2 * pp
    if microbatches <= few + pp or microbatches % pp:
        return idle(microbatches)
    return idle(few) + (idle(few + pp) - idle(few)) / pp * (microbatches - few)


def _equivalent_microbatches(schedule: str, pp: int, microbatches: int) -> int:
    """Return a number of microbatches, at most the given one, with the same idle time and as many in flight at once.

    A table of fewer microbatches is faster to make. Without a V shape, a number that pp does not divide is returned as
    it is. Not for the load of schedules of FORWARDS_FIRST, which have all microbatches in flight.
    """
    if SCHEDULES[schedule].v_shape:
        return min(microbatches, ROUNDS * pp + 1)
    return min(microbatches, ROUNDS * pp) if microbatches % pp == 0 else microbatches


@lru_cache(maxsize=4096)
def backward_loads(
    schedule: str, pp: int, stages_per_rank: int, microbatches: int, rank: int, shared: bool = False
) -> list[BackwardLoad]:
    """Return the loads of a rank's backward passes that can be the memory peak: no load in the list exceeds another.

    With few microbatches the most are in flight only before a stage has gradients.

    Args:
        rank: the pipeline rank.
        shared: whether all stages share the vocabulary, for which more forwards come before the first backward.
    """
    v, m = stages_per_rank, microbatches
    if schedule in SINGLE:
        most = m if schedule in FORWARDS_FIRST else min(m, pp - rank + EARLIER_FORWARDS * shared)
        if most < m:
            return [BackwardLoad((most,), (True,))]
        return [BackwardLoad((m - 1,), (True,))] * (m > 1) + [BackwardLoad((m,), (False,))]
    if schedule == "DualPipeV" and m >= 2 * pp:
        begun = (rank > 0 or m > 2 * pp, True)
        loads = BackwardLoad((2 * pp - 1 - rank, 1 + rank), (True, True)), BackwardLoad((2 * pp - rank, rank), begun)
        return sorted(loads + (BackwardLoad((pp + 1, pp), (False, False)),) * (rank == pp - 1))
    if schedule not in FORWARDS_FIRST:
        m = _equivalent_microbatches(schedule, pp, m)
    if schedule == "Interleaved1F1B" and m % pp == 0:
        row = interleaved_row(pp, v, m, rank)
    else:
        row = [cell for cell in schedule_rows(schedule, pp, v, m)[rank] if cell]
    return largest_loads(with_earlier_forwards(row) if shared else row)


def interleaved_row(pp: int, stages_per_rank: int, microbatches: int, rank: int) -> list[Cell]:
    """Return a rank's cells of Interleaved1F1B where pp divides the microbatches; the rank's stages count from 0."""
    v, total = stages_per_rank, stages_per_rank * microbatches
    forward = [(Action(i // pp % v, "F", i // (v * pp) * pp + i % pp),) for i in range(total)]
    backward = [(Action(v - 1 - cell[0].stage, "B", cell[0].microbatch),) for cell in forward]
    return alternate(forward, backward, min(total, (v - 1) * pp + 2 * (pp - 1 - rank) + 1))


def largest_loads(row: list[Cell]) -> list[BackwardLoad]:
    """Return the loads of one rank's backward passes, sorted, without loads that another one exceeds.

    Args:
        row: the rank's cells in time order. A load's entries are in ascending order of the stages in it.
    """
    stages = sorted({action.stage for cell in row for action in cell})
    in_flight, begun, loads = dict.fromkeys(stages, 0), dict.fromkeys(stages, False), set[BackwardLoad]()
    for cell in row:
        if any(action.does != "F" for action in cell):
            loads.add(BackwardLoad(tuple(in_flight.values()), tuple(begun.values())))
        for action in cell:
            in_flight[action.stage] += CHANGE[action.does]
            begun[action.stage] |= CHANGE[action.does] < 0
    return sorted(load for load in loads if not any(load.is_within(other) for other in loads - {load}))
