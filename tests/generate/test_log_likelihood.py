"""Log-likelihoods of `titanmoe eval`: those of the plain model, whatever the batch and the mapping; and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import world
from tests.generate import saved
from titanmoe.generate.log_likelihood import ScoredSequence, Scorer, rolling_windows

SEQUENCES = [
    ScoredSequence([(7 * i + 3 * n) % 48 for i in range(n)], labels)
    for n, labels in ((2, 1), (17, 5), (9, 8), (30, 29), (5, 2), (12, 3), (3, 0))
]
LENGTH = 20
FOLDS: dict[str, dict[str, int]] = {"tp2 ep4": dict(tp=2, ep=4), "dp4 etp2": dict(etp=2)}


def scored(path: Path, degrees: dict[str, int], size: int, length: int = LENGTH) -> list[Any]:
    """On a rank; with generated texts in between, which share the caches."""
    generator = saved.generator(path, degrees)

    def generated() -> list[int]:
        return saved.complete(generator, [1, 2, 3], 4, temperature=0.0).tokens

    text, scorer = generated(), Scorer(generator, length)
    scores = scorer.score(SEQUENCES, size)
    assert generated() == text and scorer.score(SEQUENCES, size) == scores
    return scores


@pytest.mark.parametrize("model", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_scores_are_those_of_the_plain_model(model: str, tmp_path: Path) -> None:
    saved_model = saved.write(tmp_path / "saved", saved.MODELS[model])
    (alone,) = world.run(1, scored, tmp_path / "saved", {}, 1)
    for sequence, score in zip(SEQUENCES, alone, strict=True):
        ids = sequence.ids[-LENGTH - 1 :]
        labels = min(sequence.labels, len(ids) - 1)
        log_p = saved.plain_logits(*saved_model, ids[:-1]).log_softmax(-1)[len(ids) - 1 - labels :]
        targets = torch.tensor(ids[len(ids) - labels :], dtype=torch.int64)
        assert score.log_p == pytest.approx(float(log_p.gather(1, targets[:, None]).sum()), rel=1e-10, abs=1e-12)
        assert score.is_greedy == bool((log_p.argmax(-1) == targets).all())
    assert any(score.is_greedy for score in alone) and not all(score.is_greedy for score in alone)
    for ranks, degrees, size in ((1, {}, 3), (1, {}, 50), *((4, fold, 2) for fold in FOLDS.values())):
        for other in world.run(ranks, scored, tmp_path / "saved", degrees, size):
            assert [score.log_p for score in other] == pytest.approx([score.log_p for score in alone], rel=1e-10)
            assert [score.is_greedy for score in other] == [score.is_greedy for score in alone]


def test_rolling_windows_are_the_harness_s() -> None:
    """Compare with the example of `LM.loglikelihood_rolling`: each token is scored once."""
    windows = rolling_windows(list(range(10)), -1, 4)
    found = [(ids[:-1], ids[len(ids) - labels :]) for ids, labels in windows]
    assert found == [([-1, 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]), ([5, 6, 7, 8], [8, 9])]
    assert rolling_windows([5], 2, 4) == [ScoredSequence([2, 5], 1)] and rolling_windows([], 2, 4) == []
