"""What is cached of a text serves the next one that begins like it, as far as each kind of cache reaches back."""

from __future__ import annotations

import pytest

from tests import world
from tests.generate import saved
from tests.support.case_features import MODELS

MOST = 4
NEW = [7, 30, 2, 41, 19]
ALL = 1000
# Each prompt: how much of what is cached then it begins with, and what follows.
TURNS = [[0, 5, 11, 17, 3, 29, 8], [ALL, *NEW], [4, *NEW], [2, 9], [3, 1, 0], [3, 21]]
KEYS = {"model.num_layers": 2}


@pytest.mark.parametrize(
    ("model", "ranks", "read"),
    [
        # The first two forwards of a turn: cached are 9, 18, 12, 6, 8 tokens after the turns, all but the last token.
        ("gpt_oss", 1, [6, 5, 9, 3, 5, 4]),
        ("gpt_oss", 2, [6, 5, 9, 3, 5, 4]),
        ("wide_window", 1, [6, 5, 5, 1, 2, 1]),
        ("deepseek_v3", 1, [6, 5, 5, 1, 2, 1]),
        ("deepseek_v3", 2, [6, 5, 5, 1, 2, 1]),
    ],
)
def test_turns_go_on_from_what_is_cached(tmp_path, model: str, ranks: int, read: list[int]) -> None:
    changes = MODELS[model] if model in MODELS else MODELS["gpt_oss"] | {"model.sliding_window": 64}
    plain = saved.write(tmp_path / "saved", changes)
    answers = world.run(ranks, saved.turns, tmp_path / "saved", {"tp": ranks}, TURNS, MOST)
    assert all(answer == answers[0] for answer in answers)
    assert [counts[0] for _, counts in answers[0]] == read
    for row, counts in answers[0]:
        assert counts[1:] == [1] * (MOST - 1)
        likeliest = saved.plain_logits(*plain, row)[-MOST - 1 : -1].argmax(-1)
        assert row[-MOST:] == likeliest.tolist()
