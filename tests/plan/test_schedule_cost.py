"""Formulas of common schedules against their tables, torch's own where it has one."""

from __future__ import annotations

import pytest

from titanmoe.fold.pipeline_schedules import Cell, bubble
from titanmoe.plan.schedule_cost import _in_flight, in_flight_by_stage, schedule_cost, schedule_rows


def _by_stage(row: list[Cell]) -> set[tuple[int, ...]]:
    """After each cell: how many microbatches each of the rank's stages keeps."""
    change = {"F": 1, "B": -1, "W": -1, "I": 0}
    counts = dict.fromkeys(sorted({action.stage for cell in row for action in cell}), 0)
    states = set()
    for cell in row:
        for action in cell:
            counts[action.stage] += change[action.does]
        states.add(tuple(counts.values()))
    return states


@pytest.mark.parametrize(
    ("schedule", "pp", "stages", "microbatches"),
    [
        ("GPipe", 4, 1, 6),
        ("1F1B", 4, 1, 9),
        ("LoopedBFS", 2, 2, 4),
        ("Interleaved1F1B", 4, 2, 8),
        ("Interleaved1F1B", 2, 3, 2),
        ("Interleaved1F1B", 4, 2, 6),
        ("DualPipeV", 2, 2, 12),
        ("ZBVZeroBubble", 2, 2, 12),
        ("InterleavedZeroBubble", 2, 2, 12),
    ],
)
def test_idle_time_and_flights_are_those_of_the_table(schedule: str, pp: int, stages: int, microbatches: int) -> None:
    rows = schedule_rows(schedule, pp, stages, microbatches)
    cost = schedule_cost(schedule, pp, stages, microbatches)
    assert cost.idle / (cost.idle + microbatches) == pytest.approx(bubble(rows, pp * stages), abs=1e-9)
    assert cost.in_flight == tuple(map(_in_flight, rows))
    for rank, row in enumerate(rows):
        by_stage = in_flight_by_stage(schedule, pp, stages, microbatches, rank)
        assert sum(by_stage) == pytest.approx(cost.in_flight[rank])
        if schedule in ("DualPipeV", "Interleaved1F1B") and microbatches % pp == 0:
            assert by_stage in _by_stage(row)
