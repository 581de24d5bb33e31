"""With a cache, one token or two at a time, for rows of any lengths together: the same logits as for whole sequences
without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import world
from tests.generate import saved
from tests.generate.saved import MODELS
from titanmoe.ops import counter_rng

PROMPTS = [1, 5, 13, 2, 17]  # the longest spans many of gpt_oss's windows of 3
FURTHER = 3
FOLDS = {
    "tp2-ep4": dict(tp=2, ep=4),
    "tp2-ep2-etp2": dict(tp=2, ep=2, etp=2),
    "dp4-ep2-etp2": dict(ep=2, etp=2),
    "tp4": dict(tp=4),
}
# Every family on one rank; folded, each in one way, and each way with some family.
CASES = [(name, "alone") for name in MODELS] + [
    ("mixtral", "dp4-ep2-etp2"),
    ("qwen2_moe", "tp4"),
    ("qwen3_moe", "tp2-ep4"),
    ("olmoe", "tp4"),
    ("gpt_oss", "tp2-ep2-etp2"),
    ("sigmoid_groups", "tp2-ep4"),
    ("deepseek_v3", "tp2-ep2-etp2"),
    ("qwen3_next", "tp2-ep4"),
]


def rows(vocab_size: int) -> list[list[int]]:
    return [
        (counter_rng.bits(counter_rng.key("row", number), torch.arange(prompt + FURTHER)) % vocab_size).tolist()
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    cache: dict[str, Any] = {}

    def get(name: str) -> tuple[Path, list[torch.Tensor]]:
        """A checkpoint, and the plain logits of every row."""
        if name not in cache:
            path = tmp_path_factory.mktemp(name) / "saved"
            model = saved.write(path, MODELS[name] | {"model.mtp_depth": int(name == "deepseek_v3")})
            cache[name] = path, [saved.plain_logits(*model, row) for row in rows(model[0].model.vocab_size)]
        return cache[name]

    return get


@pytest.mark.parametrize("name, fold", CASES, ids=lambda part: part)
def test_cached_logits_are_those_of_the_whole_sequence(checkpoints, name: str, fold: str) -> None:
    path, want = checkpoints(name)
    degrees = FOLDS.get(fold, {})
    results = world.run(4 if degrees else 1, saved.forced, path, degrees, rows(want[0].shape[1]), PROMPTS)
    checked = set()
    for result in results:
        for row, logits in result.items():
            first = PROMPTS[row] - 1
            whole = want[row][[*range(first, first + FURTHER - 1), first + FURTHER]]
            assert logits.shape == whole.shape == (FURTHER, want[row].shape[1])
            assert (logits - whole).abs().max() <= 1e-10 * whole.abs().max()
            checked.add(row)
    assert checked == set(range(len(PROMPTS)))
