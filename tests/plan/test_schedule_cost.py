"""Formulas of common schedules against their tables, torch's own where it has one."""

from __future__ import annotations

from itertools import accumulate

import pytest

from titanmoe.fold.pipeline_schedules import bubble
from titanmoe.plan.schedule_cost import (
    CHANGE,
    BackwardLoad,
    backward_loads,
    largest_loads,
    schedule_idle,
    schedule_rows,
)


@pytest.mark.parametrize(
    ("schedule", "pp", "stages", "microbatches"),
    [
        ("GPipe", 4, 1, 6),
        ("1F1B", 4, 1, 9),
        ("LoopedBFS", 2, 2, 4),
        ("Interleaved1F1B", 4, 2, 8),
        ("Interleaved1F1B", 2, 3, 2),
        ("Interleaved1F1B", 4, 2, 4),
        ("Interleaved1F1B", 4, 2, 6),
        ("Interleaved1F1B", 2, 2, 14),
        ("1F1B", 2, 1, 9),
        ("DualPipeV", 2, 2, 3),
        ("DualPipeV", 2, 2, 4),
        ("DualPipeV", 4, 2, 9),
        ("DualPipeV", 2, 2, 12),
        ("ZBVZeroBubble", 2, 2, 12),
        ("InterleavedZeroBubble", 2, 2, 12),
    ],
)
def test_idle_time_and_flights_are_those_of_the_table(schedule: str, pp: int, stages: int, microbatches: int) -> None:
    rows = schedule_rows(schedule, pp, stages, microbatches)
    idle = schedule_idle(schedule, pp, stages, microbatches)
    assert idle / (idle + microbatches) == pytest.approx(bubble(rows, pp * stages), abs=1e-9)
    for rank, row in enumerate(rows):
        loads = backward_loads(schedule, pp, stages, microbatches, rank)
        assert loads == largest_loads(row)
        assert max(sum(load.in_flight) for load in loads) == max(
            accumulate(sum(CHANGE[action.does] for action in cell) for cell in row)
        )


def test_of_few_microbatches_most_are_in_flight_before_there_are_gradients() -> None:
    assert backward_loads("1F1B", 2, 1, 3, 0) == [BackwardLoad((2,), (True,))]
    assert backward_loads("1F1B", 2, 1, 2, 0) == [BackwardLoad((1,), (True,)), BackwardLoad((2,), (False,))]
    assert backward_loads("GPipe", 2, 1, 9, 1) == [BackwardLoad((8,), (True,)), BackwardLoad((9,), (False,))]
    assert backward_loads("Interleaved1F1B", 2, 2, 2, 1) == [
        BackwardLoad((1, 0), (True, True)),
        BackwardLoad((2, 1), (False, True)),
    ]
