"""The next token: which are possible, how often, and that samples depend on seed, prompt and position alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from titanmoe.generate.sampling import Sampling, choose_tokens, truncate

LOGITS = [2.0, -1.0, 0.5, 2.0, 1.3, -3.0, 0.0, 1.1, -0.5, 0.4]
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 4},
    "top-k of equals": {"top_k": 1},
    "top-k of all": {"top_k": 99},
    "top-p": {"top_p": 0.7},
    "top-p of one": {"top_p": 1e-9},
    "both": {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
}
DRAWS = 40_000


def plain(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The share of every token, by the definitions."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: top_k or len(order)]
    weights = {token: math.exp(logits[token] / temperature) for token in order}
    share = {token: weight / sum(weights.values()) for token, weight in weights.items()}
    allowed, reached = [], 0.0
    for token in order:
        if reached < top_p:
            allowed.append(token)
        reached += share[token]
    whole = sum(share[token] for token in allowed)
    return [share[token] / whole if token in allowed else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("case", CASES)
def test_the_distribution(case: str) -> None:
    sampling = Sampling(**CASES[case])
    logits_BV = torch.tensor([LOGITS, LOGITS[::-1]], dtype=torch.float64)
    actual = truncate((logits_BV / sampling.temperature).softmax(-1), sampling)
    expected = [plain(row, **CASES[case]) for row in (LOGITS, LOGITS[::-1])]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(actual > 0, torch.tensor(expected) > 0)


def test_a_share_that_reaches_top_p_exactly_is_the_last() -> None:
    prob_BV = truncate(torch.full((1, 4), 0.25, dtype=torch.float64), Sampling(top_p=0.5))
    assert prob_BV.tolist() == [[0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("case", ["all", "both"])
def test_tokens_are_as_frequent_as_their_shares(case: str) -> None:
    logits_BV = torch.tensor([LOGITS]).expand(DRAWS, -1)
    sampling = Sampling(**CASES[case], seed=3)
    tokens, log_probs = choose_tokens(logits_BV, sampling, [(5, 0)] * DRAWS, list(range(DRAWS)))
    full = (torch.tensor(LOGITS).double() / sampling.temperature).log_softmax(0)
    torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), full[tokens], rtol=0, atol=1e-12)
    count = torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)).double()
    share = torch.tensor(plain(LOGITS, **CASES[case]), dtype=torch.float64)
    deviation = (DRAWS * share * (1 - share)).sqrt()
    assert ((count - DRAWS * share).abs() <= 4 * deviation).all()


def test_draws_are_functions_of_seed_step_text_and_position() -> None:
    logits_BV = torch.zeros(64, 1000)
    texts, positions = [(0, 0)] * 21 + [(1, 0)] * 21 + [(1, 1)] * 22, [*range(21), *range(21), *range(22)]

    def draw(seed: int, of: slice = slice(None), step: int = 0) -> list[int]:
        return choose_tokens(logits_BV[of], Sampling(seed=seed, step=step), texts[of], positions[of])[0]

    first = draw(0)
    assert draw(0) == first and draw(1) != first != draw(0, step=1)
    assert first[:21] != first[21:42] != first[42:63] != first[:21]
    assert draw(0, slice(20, 40)) == first[20:40]  # whatever the others are


def test_temperature_zero_takes_the_most_probable() -> None:
    logits_BV = torch.tensor([LOGITS[1:], [*LOGITS[4:], 9.0, 0, 0]])
    assert choose_tokens(logits_BV, Sampling(0), [(0, 0), (1, 0)], [3, 4])[0] == [2, 6]


def test_excluded_tokens_are_never_chosen() -> None:
    logits_BV = torch.full((2000, 5), -math.inf)
    logits_BV[:, 3] = 0
    assert set(choose_tokens(logits_BV, Sampling(), [(0, 0)] * 2000, list(range(2000)))[0]) == {3}
