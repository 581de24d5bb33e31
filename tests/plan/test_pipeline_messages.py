"""The simulation of a pipeline's messages: the page has its figures, and messages without time leave the schedule's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.pipeline_messages import Event, Message, compare, step_time
from titanmoe.fold.pipeline_schedules import SCHEDULES, Action, bubble
from titanmoe.plan.schedule_cost import schedule_rows

PAGE = Path(__file__).resolve().parents[2] / "docs/moe.md"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_that_take_no_time_leave_the_schedules_own(schedule: str) -> None:
    """If none waits for another: a pair is the exception, which waits for what only one half of it needs."""
    v = SCHEDULES[schedule].stages_per_rank
    rows = schedule_rows(schedule, 4, v, 8)
    idle = bubble(rows, 4 * v)
    times = [time / (3 * v * 8) for time in compare(schedule, 4, v, 8, 0.0).values()]
    assert times[-1] == pytest.approx(1 / (1 - idle), rel=0.04 if schedule == "DualPipeV" else 1e-9)
    one, direction, neighbour, both = times
    assert one >= direction >= both and one >= neighbour >= both


def test_a_finished_send_waits_for_an_early_receive_on_the_same_communicator() -> None:
    """Rank 1 receives from rank 2, which sends at 4, before it sends to rank 0."""
    late, ready = Message(True, 2, 0, 2, 1), Message(False, 1, 0, 1, 0)
    work = [Event((Action(stage, "B", 1),)) for stage in range(3)]
    need = Event((Action(0, "B", 0),))
    rows = [[Event((), ready), need], [Event((), late), Event((), ready)], [work[2], work[2], Event((), late)]]
    ranks = [0, 1, 2]
    assert step_time(rows, ranks, lambda message: 0, 0.5) == 4 + 0.5 + 0.5 + 2
    assert step_time(rows, ranks, lambda message: message.forward, 0.5) == 4


def test_the_page_has_its_figures() -> None:
    text = PAGE.read_text()
    lines = re.findall(r"^\| (\w+) \| (\d) ((?:\| \d\.\d{3} )+)\|$", text, re.MULTILINE)
    assert len(lines) == 5
    for schedule, v, figures in lines:
        if schedule in ("Interleaved1F1B", "1F1B", "ZBVZeroBubble") and int(v) < 7:
            times = compare(schedule, 8, int(v), 32, 0.05)
            shown = [times["one"], times["for each direction to each neighbour"]]
            assert [f"{time / (96 * int(v)):.3f}" for time in shown] == re.findall(r"\d\.\d+", figures)
