"""What counts as a spike and what does not."""

from __future__ import annotations

import math
import random

from titanmoe.train.spikes import ENOUGH, Spikes


def spikes_in(losses: list[float]) -> list[int]:
    spikes = Spikes()
    return [i for i, loss in enumerate(losses) if spikes.check(loss)]


def noise(n: int, level: float, width: float) -> list[float]:
    draw = random.Random(0)
    return [level + draw.gauss(0, width) for _ in range(n)]


def test_training_as_usual_has_none():
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
    assert spikes_in([6.0] * (ENOUGH - 1) + [60.0]) == []
    assert spikes_in([6.0] * ENOUGH + [60.0]) == [ENOUGH]


def test_a_loss_that_hardly_moves_has_no_tiny_spikes():
    assert spikes_in([2.0] * 100 + [2.05] + [2.0] * 20) == []


def test_the_text_has_the_numbers():
    spikes = Spikes()
    for _ in range(20):
        spikes.check(2.0)
    assert spikes.check(4.0) == "loss 4.0000 is 50 deviations above 2.0000, the median of the 20 steps before"
