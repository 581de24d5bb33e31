"""Completions as a batch: advantages and weights by hand, and columns whose labels, values and routes are aligned."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import parity
from titanmoe.config.schema import RL
from titanmoe.generate.loop import Generated
from titanmoe.policy import PolicyLoss
from titanmoe.rl.rewards import Reward
from titanmoe.rl.rollouts import Rollout, advantages_and_weights, columns, pack, summary
from titanmoe.tokens import IGNORE, NOT_RECORDED
from titanmoe.train.world_batch import make_batch

LAYERS, K = 2, 3


def rollout(prompt: int, reward: float, length: int = 3, is_cut: bool = False, prompt_length: int = 2) -> Rollout:
    """A completion whose ids, log-probabilities and routes are all different."""
    start = 100 * prompt + 10
    tokens = [start + 1 + i for i in range(length)]
    places = prompt_length + length - 1
    routes = torch.arange(places * LAYERS * K, dtype=torch.int16).view(places, LAYERS, K) % 7
    log_probs = [-0.01 * token for token in tokens]
    prompt_ids = [start - i for i in range(prompt_length)]
    return Rollout(prompt, prompt_ids, tokens=tokens, log_probs=log_probs, routes=routes, is_cut=is_cut, reward=reward)


def by_hand(rollouts: list[Rollout], options: RL, longest: int) -> tuple[list[float], list[float]]:
    """The formulas, one completion after the other."""
    advantages, weights = [], []
    learned = [one for one in rollouts if one.reward == one.reward and not (one.is_cut and options.cut == "mask")]
    for one in rollouts:
        group = [x for x in rollouts if x.prompt == one.prompt and x.reward == x.reward]
        values = [x.reward - (options.cut_penalty if x.is_cut else 0) for x in group]
        if one.reward != one.reward or len(set(values)) == 1:
            advantages.append(0.0)
        else:
            own = one.reward - (options.cut_penalty if one.is_cut else 0)
            advantages.append((own - fmean(values)) / (stdev(values) + 1e-6 if options.divide_by_std else 1))
        if not any(one is x for x in learned):
            weights.append(0.0)
        elif options.normalisation == "token":
            weights.append(1 / sum(len(x.tokens) for x in learned))
        else:
            weights.append(1 / len(learned) / (longest if options.normalisation == "constant" else len(one.tokens)))
    return advantages, weights


ROLLOUTS = [
    rollout(0, 1.0, 1),
    rollout(0, 0.0, 4, is_cut=True),
    rollout(0, math.nan, 2),
    rollout(0, 0.5, 3),
    rollout(1, 0.3, 2),
    rollout(1, 0.3, 4),
    rollout(2, math.nan, 1),
    rollout(2, 2.0, 3),  # a group of one is left
    rollout(3, math.nan, 1),
    rollout(3, math.nan, 4, is_cut=True),
]


@pytest.mark.parametrize("normalisation", ["token", "sample", "constant"])
@pytest.mark.parametrize(
    "options",
    [{}, {"divide_by_std": False}, {"cut": "mask"}, {"cut_penalty": 0.25}, {"cut": "mask", "cut_penalty": 0.25}],
)
def test_advantages_and_weights_are_the_formulas(options: dict[str, Any], normalisation: str) -> None:
    rl = RL(normalisation=normalisation, **options)
    advantages, weights = advantages_and_weights(ROLLOUTS, rl, 4)
    expected = by_hand(ROLLOUTS, rl, 4)
    assert advantages == pytest.approx(expected[0], rel=1e-12, abs=1e-15)
    assert weights == pytest.approx(expected[1], rel=1e-12)
    assert advantages[7] == 0 and [weights[i] for i in (2, 6, 8, 9)] == [0] * 4
    if normalisation == "token":
        assert sum(w * len(one.tokens) for w, one in zip(weights, ROLLOUTS, strict=True)) == pytest.approx(1)


def test_some_numbers_of_a_group_of_two() -> None:
    advantages, weights = advantages_and_weights([rollout(0, 1, 1), rollout(0, 0, 3)], RL(), 4)
    assert advantages == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5) and weights == [0.25, 0.25]
    sample = RL(normalisation="sample", divide_by_std=False)
    assert advantages_and_weights([rollout(0, 1, 1), rollout(0, 0, 3)], sample, 4) == ([0.5, -0.5], [0.5, 0.5 / 3])


@pytest.mark.parametrize("normalisation", ["token", "sample", "constant"])
@pytest.mark.parametrize(
    "rollouts", [[rollout(0, math.nan), rollout(0, math.nan)], [rollout(0, 1.0, 4, is_cut=True)] * 2]
)
def test_nothing_is_learned_from_without_a_completion_that_counts(rollouts: list[Rollout], normalisation: str) -> None:
    rl = RL(normalisation=normalisation, cut="mask")
    assert advantages_and_weights(rollouts, rl, 4) == ([0.0, 0.0], [0.0, 0.0])


@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_every_document_is_packed_once_and_fits(lengths: list[int]) -> None:
    samples = pack(lengths, 16)
    assert sorted(i for sample in samples for i in sample) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in sample) for sample in samples]
    assert max(filled) <= 16
    assert sum(2 * n <= 16 for n in filled) <= 1  # two samples that are half empty would have been one


def with_message(one: Rollout, places: range) -> Rollout:
    """Return the completion with an environment's message in these places."""
    for place in places:
        one.log_probs[place] = 0.0
    return replace(one, messages=[places])


def test_turns_are_added_to_a_completion() -> None:
    one = Rollout(0, [1, 2])
    experts = [torch.full((places, LAYERS, K), float(number)) for number, places in enumerate((3, 7))]
    one.add_turn(Generated(0, tokens=[5, 6], end="stop", log_probs=[-0.1, -0.2], routes=[experts[0]]), "ab")
    one.add_reward(Reward(-1.0, message="c", ids=[7, 8, 9]))
    one.add_turn(Generated(0, tokens=[5], end="eos", log_probs=[-0.3], routes=[experts[1]]), "a")
    assert one.ids == [1, 2, 5, 6, 7, 8, 9, 5] and one.labels == [5, 6, *[IGNORE] * 3, 5] and one.num_generated == 3
    assert one.log_probs == [-0.1, -0.2, 0, 0, 0, -0.3] and one.turns == ["ab", "c", "a"] and not one.is_cut
    assert one.routes[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1, 1]  # a token that was read again keeps its first experts
    assert math.isnan(one.reward)
    one.add_reward(Reward(2.0))
    assert one.reward == 2 and not one.is_cut
    one.add_reward(Reward(0.5, message="c"))
    assert one.reward == 0.5 and one.is_cut, "a message that nothing follows"


def test_messages_have_no_gradient_and_no_weight() -> None:
    rollouts = [with_message(rollout(0, 1.0, 6), range(2, 4)), rollout(0, 0.0, 6)]
    advantages, weights = advantages_and_weights(rollouts, RL(normalisation="sample"), 8)
    assert weights == pytest.approx([1 / 2 / 4, 1 / 2 / 6])
    found = columns(rollouts, advantages, weights, 8, False)
    ids, labels, documents = (found.pop(name) for name in ("ids", "labels", "documents"))
    model = parity.read({"model.vocab_size": 320, "model.top_k": K}, 1).model
    batch = make_batch(ids, labels, documents=documents, columns=found, seq_len=8, model=model)
    has_label = batch.labels_BS != IGNORE
    changed = {name: x + 0.5 * ~has_label for name, x in batch.extra_fields.items()}
    results = []
    for own, shift in ((batch, 0.0), (batch._replace(extra_fields=changed), -0.5)):
        log_p = (torch.where(has_label, -0.3, -0.3 + shift)).double().requires_grad_()
        loss = PolicyLoss(truncation=2.0)(log_p, own)
        results.append((loss.detach(), *torch.autograd.grad(loss, log_p)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][1] != 0, has_label) and int(has_label.sum()) == 10


@pytest.mark.parametrize("replay", [False, True])
def test_columns_are_aligned(replay: bool) -> None:
    rollouts = [
        rollout(0, 1.0, 1, prompt_length=1),  # a token after a token
        rollout(1, 0.0, 6, prompt_length=2),  # fills a sample
        with_message(rollout(2, 0.5, 3, is_cut=True, prompt_length=2), range(1, 2)),
        rollout(3, math.nan, 1, prompt_length=4),
    ]
    advantages, weights = [1.0, -1.0, 0.5, 0.0], [0.1, 0.2, 0.3, 0.0]
    found = columns(rollouts, advantages, weights, 8, replay)
    assert ("routes" in found) == replay
    assert sorted(len(sample) for sample in found["ids"]) == [5, 7, 8]
    seen = []
    for n, ids in enumerate(found["ids"]):
        documents = found["documents"][n]
        assert len(ids) <= 8 and all(len(found[name][n]) == len(ids) for name in found)
        assert documents == sorted(documents)
        for number in range(documents[-1] + 1):
            places = [i for i, document in enumerate(documents) if document == number]
            own = [ids[i] for i in places]
            (index,) = [i for i, one in enumerate(rollouts) if one.prompt_ids + one.tokens == own]
            one, seen = rollouts[index], [*seen, index]
            last_of_prompt = len(one.prompt_ids) - 1
            for j, i in enumerate(places):
                is_message = any(j - last_of_prompt in places for places in one.messages)
                has_label = last_of_prompt <= j < len(own) - 1 and not is_message
                assert found["labels"][n][i] == (own[j + 1] if has_label else IGNORE)
                assert found["advantage"][n][i] == (advantages[index] if has_label else 0)
                assert found["weight"][n][i] == (weights[index] if has_label else 0)
                expected = one.log_probs[j - last_of_prompt] if has_label else 0.0
                assert found["generator"][n][i] == torch.tensor(expected, dtype=torch.float64)
                if replay and j < len(own) - 1:
                    assert torch.equal(found["routes"][n][i], one.routes[j])
                elif replay:
                    assert (found["routes"][n][i] == NOT_RECORDED).all()
    assert sorted(seen) == [0, 1, 2, 3]


def test_columns_make_a_batch() -> None:
    model = parity.read({"model.vocab_size": 320, "model.top_k": K}, 1).model
    rollouts = [rollout(0, 1.0, 1), rollout(0, 0.0, 6), rollout(1, 0.5, 3)]
    found = columns(rollouts, *advantages_and_weights(rollouts, RL(), 6), 8, True)
    ids, labels, documents = (found.pop(name) for name in ("ids", "labels", "documents"))
    batch = make_batch(ids, labels, documents=documents, columns=found, seq_len=8, model=model)
    has_label_NS = batch.labels_BS != IGNORE
    assert int(has_label_NS.sum()) == 10 and float(batch.extra_fields["weight"].sum()) == pytest.approx(1)
    for name in ("weight", "generator"):
        assert torch.equal(batch.extra_fields[name] != 0, has_label_NS)


def test_the_summary_counts_what_teaches_nothing() -> None:
    assert summary(ROLLOUTS) == {
        "rl.reward": pytest.approx((1 + 0.5 + 0.6 + 2) / 6),
        "rl.unrewarded": 4,
        "rl.length": pytest.approx(25 / 10),
        "rl.turns": 1,
        "rl.cut": pytest.approx(0.2),
        "rl.equal_rewards": pytest.approx(3 / 4),  # all equal, one alone, none
    }
