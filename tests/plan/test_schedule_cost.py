"""Formulas of common schedules against their tables, torch's own where it has one."""

from __future__ import annotations

import pytest

from titanmoe.fold.pipeline_schedules import Cell, bubble
from titanmoe.plan.schedule_cost import _in_flight, held, played, table


def _by_stage(row: list[Cell]) -> set[tuple[int, ...]]:
    """After each cell: how many microbatches each of the rank's stages keeps."""
    change = {"F": 1, "B": -1, "W": -1, "I": 0}
    counts = dict.fromkeys(sorted({action.stage for cell in row for action in cell}), 0)
    found = set()
    for cell in row:
        for action in cell:
            counts[action.stage] += change[action.does]
        found.add(tuple(counts.values()))
    return found


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
    rows = table(schedule, pp, stages, microbatches)
    found = played(schedule, pp, stages, microbatches)
    assert found.idle / (found.idle + microbatches) == pytest.approx(bubble(rows, pp * stages), abs=1e-9)
    assert found.flights == tuple(map(_in_flight, rows))
    for rank, row in enumerate(rows):
        shares = held(schedule, pp, stages, microbatches, rank)
        assert sum(shares) == pytest.approx(found.flights[rank])
        if schedule in ("DualPipeV", "Interleaved1F1B") and microbatches % pp == 0:
            assert shares in _by_stage(row)
