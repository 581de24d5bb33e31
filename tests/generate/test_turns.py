"""What is cached of a text serves the next one that begins like it, as far as each kind of cache reaches back."""

from __future__ import annotations

import pytest

from tests import world
from tests.generate import saved
from tests.generate.saved import MODELS

MOST = 4
NEW = [7, 30, 2, 41, 19]
ALL = 1000
# Each prompt: how much of what is cached then it begins with, and what follows.
TURNS = [[0, 5, 11, 17, 3, 29, 8], [ALL, *NEW], [4, *NEW], [2, 9], [3, 1, 0], [3, 21]]
WIDE = MODELS["gpt_oss"] | {"model.sliding_window": 64}


@pytest.mark.parametrize(
    ("model", "ranks", "read"),
    [
        # With windows of 3, and with a state, nothing is cached of earlier places: a turn that differs is read anew.
        ("gpt_oss", 1, [6, 5, 9, 3, 5, 4]),
        ("gpt_oss", 2, [6, 5, 9, 3, 5, 4]),
        ("wide_window", 1, [6, 5, 5, 1, 2, 1]),
        ("deepseek_v3", 1, [6, 5, 5, 1, 2, 1]),
        ("deepseek_v3", 2, [6, 5, 5, 1, 2, 1]),
        ("qwen3_next", 1, [6, 5, 9, 3, 5, 4]),
        ("qwen3_next", 2, [6, 5, 9, 3, 5, 4]),
        ("wide_convolution", 1, [6, 5, 9, 3, 5, 4]),
    ],
)
def test_turns_go_on_from_what_is_cached(tmp_path, model: str, ranks: int, read: list[int]) -> None:
    plain = saved.write(tmp_path / "saved", MODELS.get(model, WIDE))
    results = world.run(ranks, saved.turns, tmp_path / "saved", {"tp": ranks}, TURNS, MOST)
    assert all(result == results[0] for result in results)
    assert [counts[0] for _, counts in results[0]] == read
    for row, counts in results[0]:
        assert counts[1:] == [1] * (MOST - 1)
        most_probable = saved.plain_logits(*plain, row)[-MOST - 1 : -1].argmax(-1)
        assert row[-MOST:] == most_probable.tolist()
