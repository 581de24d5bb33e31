"""The learning rate at chosen steps."""

from __future__ import annotations

import itertools
import math

import pytest

from tests import parity
from titanmoe.config.fields import flatten
from titanmoe.config.schema import Config, LRSchedule, Optimizer
from titanmoe.fold.degrees import derive
from titanmoe.train.header import make_header
from titanmoe.train.learning_rate import LearningRate, describe_rate_change, lr_factor, warn_of_high_rate


@pytest.mark.parametrize(
    "decay, wanted",
    [
        ("none", {11: 1, 60: 1, 110: 1}),
        ("linear", {10: 1, 11: 1 - 0.8 / 100, 60: 0.6, 110: 0.2}),
        ("cosine", {10: 1, 35: 0.2 + 0.4 * (1 + math.sqrt(0.5)), 60: 0.6, 110: 0.2}),
        # the last fifth of 110 steps is 22 long: 1 until step 88
        ("wsd", {11: 1, 88: 1, 89: 1 - 0.8 / 22, 99: 0.6, 110: 0.2}),
    ],
)
def test_each_decay_at_chosen_steps(decay: str, wanted: dict[int, float]) -> None:
    options = LRSchedule(warmup_steps=10, decay=decay, decay_fraction=0.2, min_ratio=0.2)
    for step, factor in (wanted | {1: 0.1, 5: 0.5, 10: 1}).items():
        assert lr_factor(step, 110, options) == pytest.approx(factor, rel=1e-12), step


@pytest.mark.parametrize("decay", ["none", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup, steps", [(0, 1), (0, 7), (3, 20), (20, 20), (30, 20)])
def test_the_factor_stays_within_bounds_and_never_rises_after_warm_up(decay: str, warmup: int, steps: int) -> None:
    options = LRSchedule(warmup_steps=warmup, decay=decay, min_ratio=0.1)
    factors = [lr_factor(step, steps, options) for step in range(1, steps + 1)]
    assert all(0 < factor <= 1 for factor in factors)
    after = factors[warmup:]
    assert all(a >= b for a, b in itertools.pairwise(after))
    if after and decay != "none":
        assert after[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("decay_fraction", [0.0, 1.0])
def test_wsd_without_and_with_nothing_but_decay(decay_fraction: float) -> None:
    options = LRSchedule(warmup_steps=0, decay="wsd", decay_fraction=decay_fraction, min_ratio=0.0)
    wanted = [1, 1, 1, 1] if decay_fraction == 0 else [0.75, 0.5, 0.25, 0]
    assert [lr_factor(step, 4, options) for step in range(1, 5)] == pytest.approx(wanted)


def rate(config: Config) -> LearningRate:
    return LearningRate(config.optimizer.lr, config.training.steps, config.lr_schedule)


def test_a_longer_run_says_that_its_rate_rises_and_from_what() -> None:
    config = Config()
    config.optimizer.lr, config.training.steps, config.lr_schedule.warmup_steps = 5e-3, 60, 0
    before = flatten(config)
    assert describe_rate_change(60, before, rate(config)) == []
    config.training.steps = 120
    assert describe_rate_change(60, before, rate(config)) == [
        "note: the learning rate, which had come to 0.0005, rises to 0.00269 here, and the loss may rise with it; to "
        'keep it, set optimizer.lr = 0.0005 and lr_schedule.decay = "none"'
    ]
    config.optimizer.lr, config.training.steps = 2e-2, 60
    assert "rises to 0.002 here" in describe_rate_change(60, before, rate(config))[0], (
        "no step is left, so the last one's rate"
    )
    config.optimizer.lr, config.training.steps = 5e-3, 120
    assert describe_rate_change(0, before, rate(config)) == [], "nothing has been made yet"
    config.optimizer.lr, config.lr_schedule.decay = 5e-4, "none"
    assert describe_rate_change(60, before, rate(config)) == []
    config.optimizer.lr = 1e-4
    assert describe_rate_change(60, before, rate(config)) == [
        "note: the learning rate falls from 0.0005 to 0.0001 here"
    ]
    assert describe_rate_change(60, {}, rate(config)) == []
    before["lr_schedule.min_ratio"] = 0.0
    assert describe_rate_change(60, before, rate(config)) == [
        "note: the learning rate, which had come to 0, rises to 0.0001 here, and the loss may rise with it"
    ], "a rate of 0 is refused"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 2e-2}, []),
        ({"lr": 3e-2}, ["optimizer.lr = 0.03: above 0.02, which is high for AdamW; 1e-4 to 1e-3 is usual"]),
        ({"name": "muon", "lr": 2e-2}, []),
        ({"name": "muon", "lr": 0.1, "adamw_lr": 1e-3}, []),
        ({"name": "muon", "lr": 0.1}, ["optimizer.lr = 0.1: above 0.02, which is high for AdamW"]),
        ({"name": "muon", "lr": 0.3, "adamw_lr": 1e-3}, ["optimizer.lr = 0.3: above 0.2, which is high for Muon's"]),
        ({"lr": 1e-3, "groups": [{"match": ["*"], "lr": 0.5}]}, ["optimizer.groups, group 1, lr = 0.5: above 0.02"]),
        ({"name": "somebody.s:Optimizer", "lr": 0.5}, []),
    ],
)
def test_a_rate_that_is_far_from_usual_is_said(options: dict, said: list[str]) -> None:
    lines = warn_of_high_rate(Optimizer(**options)).splitlines()
    assert len(lines) == len(said) and all(line.startswith(text) for line, text in zip(lines, said, strict=True))


def test_the_header_has_it() -> None:
    for lr, there in ((1e-2, False), (1.0, True)):
        config = parity.read({"optimizer.lr": lr}, 1)
        rows = make_header(config, derive(1, config.parallelism), "CPU", None).batches
        assert ("learning rate" in rows) == there
    assert "optimizer.lr = 1: above 0.02" in str(rows["learning rate"])


@pytest.mark.parametrize(
    ("changes", "said"), [({"lora.rank": 0}, "; all are trained"), ({"lora.rank": 4}, " are trained, in adapters")]
)
def test_the_header_says_what_is_trained(changes: dict, said: str) -> None:
    config = parity.read(changes, 1)
    rows = make_header(config, derive(1, config.parallelism), "CPU", None).mapping
    assert rows["model"].endswith(said)
