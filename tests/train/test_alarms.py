"""Spikes and a loss that flies away are reported, and healthy losses are not. Collapse: tests/train/test_metrics.py."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from titanmoe.train.alarms import MIN_LOSSES, DivergenceAlarm, ExpectedLoss, SpikeAlarm


def spikes_in(losses: list[float]) -> list[int]:
    spikes = SpikeAlarm()
    return [i for i, loss in enumerate(losses) if spikes.check(loss)]


def noise(n: int, level: float, width: float) -> list[float]:
    draw = random.Random(0)
    return [level + draw.gauss(0, width) for _ in range(n)]


def test_training_as_usual_has_no_spikes():
    assert spikes_in([6 * math.exp(-i / 20) + 2 for i in range(300)]) == []
    assert spikes_in(noise(500, 2.5, 0.1)) == []
    assert spikes_in([2.0] * 100) == []


def test_a_spike_is_reported_once_and_the_next_one_again():
    losses = noise(200, 2.5, 0.02)
    losses[100:104] = [3.5, 4.0, 3.8, 3.1]
    losses[150] = 3.5
    assert spikes_in(losses) == [100, 150]


def test_a_new_level_is_a_spike_first_and_then_the_usual():
    assert spikes_in(noise(100, 2.0, 0.01) + noise(200, 3.0, 0.01)) == [100]


def test_little_is_known_at_first():
    assert spikes_in([6.0] * (MIN_LOSSES - 1) + [60.0]) == []
    assert spikes_in([6.0] * MIN_LOSSES + [60.0]) == [MIN_LOSSES]


def test_a_loss_that_hardly_moves_has_no_tiny_spikes():
    assert spikes_in([2.0] * 100 + [2.05] + [2.0] * 20) == []


def test_the_text_has_the_numbers():
    spikes = SpikeAlarm()
    for _ in range(20):
        spikes.check(2.0)
    assert spikes.check(4.0) == "loss 4.0000 is 50 deviations above 2.0000, the median of the 20 steps before"


def events(losses: Iterable[float], warmup: int = 5, guess: float = math.log(320)) -> dict[int, str]:
    watch, smoothed, weight, found = DivergenceAlarm(ExpectedLoss(warmup, 3.0, guess)), 0.0, 0.0, {}
    for step, loss in enumerate(losses, 1):
        if math.isfinite(loss):
            smoothed, weight = 0.9 * smoothed + 0.1 * loss, 0.9 * weight + 0.1
        if text := watch.check(step, loss, smoothed / max(weight, 0.1)):
            found[step] = text
    return found


def test_a_loss_far_above_where_it_began_is_reported_once_and_when_it_is_back():
    flown = [6.3, 30.0, 165.0, *[8.3] * 40]
    (step, text), *more = events(flown).items()
    assert step == 3 and not more, "at once"
    assert text == (
        "since step 2 the loss is far too high, up to 165: it was 6.3 at the first step: lower optimizer.lr (3) or "
        "raise lr_schedule.warmup_steps (5), and start again, or continue from an earlier checkpoint (checkpoint.load "
        "= its step)"
    )
    again = events([*flown, *[2.0, 2.0, 9.0], *[2.0] * 16, *[9.0] * 30])
    assert [(step, text[:17]) for step, text in again.items()] == [
        (3, "since step 2 the "),
        (62, "the loss has reco"),
        (78, "since step 63 the"),
    ]


def test_so_is_one_that_falls_back_to_counting_tokens():
    fallen = [max(2.0, 6.3 - 0.1 * step) for step in range(100)] + [4.9] * 30
    assert list(events(fallen)) == [116]


def test_so_is_one_that_stays_above_a_guess_unless_there_is_nothing_to_learn():
    stuck = [5.9] * 80
    (found,) = events(stuck).items()
    assert found[0] == 55 and "since step 6 the loss is far too high, up to 5.9: a uniform guess has 5.768:" in found[1]
    assert not events(stuck, guess=math.inf) and not events(stuck, warmup=60)


def healthy() -> dict[str, list[float]]:
    draw = random.Random(0)
    wobble = [0.9 + draw.uniform(-0.45, 0.45) for _ in range(2000)]
    fall = [1.8 + 9.2 * math.exp(-step / 60) + draw.uniform(-0.2, 0.2) for step in range(600)]
    spikes = [loss + (6.0 if step % 100 > 92 and step > 200 else 0.0) for step, loss in enumerate(fall)]
    return {
        "a run from scratch": fall,
        "with a long warm-up": [math.log(320) + 0.4 - 0.002 * step for step in range(400)],
        "with spikes of 7 steps": spikes,
        "with one huge spike": [*fall[:300], 900.0, *fall[300:]],
        "with steps that were skipped": [math.nan if step % 3 else loss for step, loss in enumerate(fall)],
        "a fine-tune that starts low and wobbles": wobble,
        "a fine-tune that first gets worse": [0.9 + 0.8 * math.exp(-(((step - 30) / 20) ** 2)) for step in range(300)],
    }


@pytest.mark.parametrize("name", healthy())
def test_healthy_runs_are_left_alone(name):
    assert events(healthy()[name], warmup=250 if "warm-up" in name else 5) == {}
