"""Which prompts share a batch or a rank, and which have ended, changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import world
from tests.generate import saved
from tests.generate.saved import MODELS
from titanmoe.ops import counter_rng

MOST = 6
FOLDS: dict[str, dict[str, int]] = {
    "tp2-ep4": dict(tp=2, ep=4),
    "tp2-ep2-etp2": dict(tp=2, ep=2, etp=2),
    "dp4-etp4": dict(etp=4),
}
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}


def prompts(vocab_size: int) -> list[list[int]]:
    lengths = [3, 1, 9, 2, 14, 5, 7]
    return [
        (counter_rng.bits(counter_rng.key("prompt", i), torch.arange(n)) % vocab_size).tolist()
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gpt_oss") / "saved"
    return path, saved.write(path, MODELS["gpt_oss"])


def ask(ranks: int, path: Path, degrees: dict[str, int], size: int, eos: int | None, **sampling: Any) -> list:
    answers = world.run(ranks, saved.tokens, path, degrees, prompts(48), size, MOST, eos, sampling)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_greedy_tokens_are_the_plain_models(checkpoint) -> None:
    path, model = checkpoint
    for (number, tokens, end), prompt in zip(ask(1, path, {}, 3, None, temperature=0), prompts(48), strict=True):
        row = list(prompt)
        for _ in range(MOST):
            row.append(int(saved.plain_logits(*model, row)[-1].argmax()))
        assert (prompt + tokens, end) == (row, "length"), number


def with_an_end(endless: list) -> tuple[int, list]:
    """A token that ends some rows, at different times; and what is then made."""
    ends = {token: {row.index(token) for _, row, _ in endless if token in row} for token in range(48)}
    eos = max(ends, key=lambda token: len(ends[token]))
    assert len(ends[eos]) >= 2 and any(eos not in row for _, row, _ in endless)
    return eos, [
        (number, row[: row.index(eos)], "eos") if eos in row else (number, row, "length") for number, row, _ in endless
    ]


@pytest.mark.parametrize(
    "sampling, folds", [({"temperature": 0.0}, list(FOLDS)), (SAMPLED, ["tp2-ep2-etp2"])], ids=["greedy", "drawn"]
)
def test_batches_and_mappings_change_no_token(checkpoint, sampling: dict[str, Any], folds: list[str]) -> None:
    path, _ = checkpoint
    endless = ask(1, path, {}, 1, None, **sampling)
    assert [number for number, _, _ in endless] == list(range(7))
    eos, want = with_an_end(endless)
    assert ask(1, path, {}, 1, eos, **sampling) == want
    assert ask(1, path, {}, 16, eos, **sampling) == want
    for fold in folds:
        assert ask(4, path, FOLDS[fold], 2, eos, **sampling) == want


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_rows_that_go_on_keep_what_is_theirs(tmp_path: Path, name: str) -> None:
    saved.write(tmp_path / "saved", MODELS[name])
    eos, want = with_an_end(ask(1, tmp_path / "saved", {}, 1, None, temperature=0.0))
    assert ask(1, tmp_path / "saved", {}, 16, eos, temperature=0.0) == want


def test_a_prompt_that_has_its_first_tokens_already_goes_on_with_the_same(checkpoint) -> None:
    """A draw depends on where its token is in the row, not on where the prompt ended."""
    path, _ = checkpoint
    whole, rest = world.run(1, in_two, path)[0]
    assert whole[2:] == rest


def in_two(path: Path) -> tuple[list[int], list[int]]:
    from titanmoe.generate.loop import Prompt, Sampling

    generator, sampling = saved.generator(path, {}), Sampling(seed=5)
    (whole,) = generator.batch([Prompt(0, [1, 2, 3])], MOST, sampling)
    (rest,) = generator.batch([Prompt(0, [1, 2, 3, *whole.tokens[:2]])], MOST - 2, sampling)
    return whole.tokens, rest.tokens


def test_tokens_beyond_the_tokenizers_are_never_chosen(checkpoint) -> None:
    path, _ = checkpoint
    tokens = world.run(1, narrow, path)[0]
    assert tokens <= set(range(5)) and len(tokens) > 1


def narrow(path: Path) -> set[int]:
    from titanmoe.generate.loop import Prompt, Sampling

    generator = saved.generator(path, {})
    generator.vocab_size = 5
    return {token for generated in generator.batch([Prompt(0, [1])], 40, Sampling()) for token in generated.tokens}
