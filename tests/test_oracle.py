"""The oracle itself, in one process: what equals the plain model passes, and no wrong number or NaN does, anywhere."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests import parity, reference
from tests.parity import Outcome
from tests.support.parity_errors import LAYER

CHANGES = {
    "moe.aux_loss_sequence": 0.02,
    "moe.aux_loss": 0.03,
    "moe.aux_loss_global": 0.04,
    "moe.z_loss": 0.01,
    "moe.bias_update_rate": 0.05,
    "moe.capacity_factor": 1.0,
    "moe.capacity_scope": "full_sequence",
    "model.mtp_depth": 1,
    "training.global_batch_size": 2,
}
LAYERS = 3  # including that of multi-token prediction


@functools.cache
def wanted() -> reference.Run:
    return parity.expected(CHANGES, 1)


def perfect() -> Outcome:
    """The report of a run that agrees to the last bit."""
    want = wanted()
    reports: list[dict[str, Any]] = []
    for step in want.steps:
        report = {name: CHANGES[f"moe.{name}"] * term for name, term in step.aux.items()}
        for layer in step.counts:
            values = step.counts[layer].tolist(), step.dropped[layer], step.imbalance[layer], step.entropy[layer]
            report |= {f"layers.{layer}.{key}": value for key, value in zip(LAYER, values, strict=True)}
        reports.append(report | {"mtp_loss": step.mtp})
    losses, norms = [step.loss for step in want.steps], [step.grad_norm for step in want.steps]
    return copy.deepcopy(Outcome(losses, norms, reports, want.steps[0].grads, want.weights, want.bias))


def at(tensors: dict[str, Any], which: int) -> tuple[Any, int]:
    return tensors[list(tensors)[which]].view(-1), -1


# By the error's name: the place of a number that it has to catch; the last of several, which a comparison may skip.
PLACES: dict[str, Callable[[Outcome], tuple[Any, Any]]] = {
    "loss": lambda got: (got.loss, 1),
    "norm": lambda got: (got.norm, 1),
    "grads": lambda got: at(got.grads, -1),
    "weights": lambda got: at(got.weights, -1),
    "bias": lambda got: at(got.bias, -1),
    "load": lambda got: (got.reports[1][f"layers.{LAYERS - 1}.load"], -1),
    "dropped": lambda got: (got.reports[1], f"layers.{LAYERS - 1}.dropped_fraction"),
    "imbalance": lambda got: (got.reports[1], f"layers.{LAYERS - 1}.imbalance"),
    "entropy": lambda got: (got.reports[1], f"layers.{LAYERS - 1}.router_entropy"),
    "mtp_loss": lambda got: (got.reports[1], "mtp_loss"),
    **{name: lambda got, name=name: (got.reports[1], name) for name in reference.KEYS},
}


def test_what_equals_the_plain_model_passes() -> None:
    errors = parity.compare(perfect(), wanted(), parity.read(CHANGES, 1))
    assert errors == dict.fromkeys(PLACES, 0.0)
    assert any(wanted().steps[0].dropped.values()), "nothing was dropped"


@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_number_is_an_error_of_its_size_and_a_nan_an_infinite_one(place: str) -> None:
    config = parity.read(CHANGES, 1)
    for wrong in (math.nan, math.inf, None):
        got = perfect()
        where, key = PLACES[place](got)
        where[key] = float(where[key]) * 1.001 + 1e-3 if wrong is None else wrong
        errors = parity.compare(got, wanted(), config)
        off = errors.pop(place)
        assert off > 1e-6 if wrong is None else off == math.inf, (wrong, off)
        assert set(errors.values()) == {0.0}


@pytest.mark.parametrize("place", ["grads", "weights", "bias"])
def test_a_reference_with_a_nan_agrees_with_nothing(place: str) -> None:
    got = perfect()
    for name in getattr(got, place):
        want = {key: tensor.clone() for key, tensor in getattr(got, place).items()}
        want[name].view(-1)[0] = math.nan
        assert parity.worst_error(getattr(got, place), want) == (math.inf, name)
    assert parity.relative_error(1.0, math.nan) == parity.relative_error(math.nan, math.nan) == math.inf


def test_tensors_that_are_missing_are_named() -> None:
    got = perfect()
    del got.grads["embed.weight"]
    with pytest.raises(AssertionError, match=r"embed\.weight"):
        parity.compare(got, wanted(), parity.read(CHANGES, 1))
