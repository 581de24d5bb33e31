"""What a pipeline schedule's own table says: how long ranks idle, and how many microbatches a rank has in flight."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from titanmoe.fold.pipeline_schedules import SCHEDULES, SINGLE, Action, Cell, bubble, single_order

ROUNDS = 3
"""Microbatches per rank when a table is played through: from 2 on, one more changes neither the idle time nor how
many are in flight."""
ALL_AHEAD = ("GPipe", "LoopedBFS")
"""Every forward before the first backward."""


class ScheduleCost(NamedTuple):
    idle: float
    """Idle time over the busy time of one microbatch."""
    in_flight: tuple[int, ...]
    """For each rank: the most pairs of microbatch and stage whose activations are kept at once."""


def schedule_rows(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> list[list[Cell]]:
    """The rows of torch's own schedule, made without process groups."""
    if schedule in SINGLE:
        return single_order(schedule, pp, microbatches)
    from torch.distributed.pipelining import schedules as torch_schedules

    kind = getattr(torch_schedules, f"Schedule{schedule}")
    torch_schedule = kind.__new__(kind)
    torch_schedule.pp_group_size, torch_schedule.n_local_stages, torch_schedule._n_microbatches = (
        pp,
        stages_per_rank,
        microbatches,
    )
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


def _in_flight(row: list[Cell]) -> int:
    change = {"F": 1, "B": -1, "W": -1, "I": 0}
    return max(accumulate(sum(change[action.does] for action in cell) for cell in row), default=0)


@lru_cache(maxsize=4096)
def schedule_cost(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> ScheduleCost:
    v, even = stages_per_rank, microbatches % pp == 0
    if schedule in ALL_AHEAD:
        return ScheduleCost((pp - 1) / v, (microbatches * v,) * pp)
    if schedule == "1F1B":  # what the table gives, without playing it
        return ScheduleCost(pp - 1.0, tuple(min(microbatches, pp - rank) for rank in range(pp)))
    if schedule == "Interleaved1F1B" and even and v > 1:
        ahead = ((v - 1) * pp + 2 * (pp - 1 - rank) + 1 for rank in range(pp))
        return ScheduleCost((pp - 1) / v, tuple(min(microbatches * v, n) for n in ahead))
    if schedule == "DualPipeV" and microbatches >= 2 * pp:
        return ScheduleCost((pp - 1) / 3, (2 * pp,) * (pp - 1) + (2 * pp + 1,))
    most = ROUNDS * pp + 1
    m = most if microbatches > most and SCHEDULES[schedule].v_shape else microbatches
    m = ROUNDS * pp if microbatches > ROUNDS * pp and even and not SCHEDULES[schedule].v_shape else m
    rows = schedule_rows(schedule, pp, stages_per_rank, m)
    share = bubble(rows, pp * stages_per_rank)
    return ScheduleCost(share / (1 - share) * m, tuple(_in_flight(row) for row in rows))


def in_flight_by_stage(schedule: str, pp: int, stages_per_rank: int, microbatches: int, rank: int) -> tuple[float, ...]:
    """A rank's microbatches in flight, split by its stages, which need not have equally many layers."""
    v, in_flight = stages_per_rank, schedule_cost(schedule, pp, stages_per_rank, microbatches).in_flight[rank]
    if schedule == "DualPipeV" and microbatches >= 2 * pp:
        return (2 * pp - 1 - rank, 1 + rank) if rank < pp - 1 else (pp + 1, pp)
    if schedule == "Interleaved1F1B" and microbatches % pp == 0:  # forwards go through the stages in turn, pp of each
        rounds, rest = divmod(in_flight, pp * v)
        return tuple(rounds * pp + min(pp, max(0, rest - stage * pp)) for stage in range(v))
    return (in_flight / v,) * v
