"""Formulas of common schedules against their tables, torch's own where it has one."""

from __future__ import annotations

import pytest

from titanmoe.fold.schedules import bubble
from titanmoe.plan.schedule import _in_flight, played, table


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
