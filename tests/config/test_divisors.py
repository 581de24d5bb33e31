"""Divisors, and what a fix offers of many values."""

from titanmoe.config.ranges import choices_text, divisors


def test_divisors():
    assert [divisors(n) for n in (-2, 0, 1, 12, 16, 17)] == [
        [], [], [1], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16], [1, 17]
    ]  # fmt: skip


def test_of_many_values_the_nearest_are_offered():
    assert choices_text("tp", [4], 3) == "tp = 4"
    assert choices_text("tp", [1, 2, 4], 3) == "tp in 1, 2, 4"
    assert choices_text("tp", list(range(1, 100)), 50) == "tp in 46, 47, 48, 49, 50, 51, 52, 53"
