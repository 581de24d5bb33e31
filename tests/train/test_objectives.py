"""Objectives: what they refuse, and that the step and every pipeline take one that is no sum over labels."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests import parity, reference
from tests.support import entropy_objective, pair_objective
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.train.objectives.objective_spec import OBJECTIVES

reference.OBJECTIVES |= {pair_objective.NAME: pair_objective.mean, entropy_objective.NAME: entropy_objective.mean}
PAIRS = {"training.objective": pair_objective.NAME, "training.local_batch_size": 2, "training.global_batch_size": 4}


@pytest.mark.parametrize(
    "mapping",
    [
        {"parallelism.cp": 2, "parallelism.tp": 2},
        {"parallelism.pp": 2, "parallelism.cp": 2, "pipeline.schedule": "1F1B"},
        {"parallelism.pp": 2, "pipeline.schedule": "DualPipeV", "model.num_layers": 4},
        {"parallelism.pp": 2, "parallelism.cp": 2, "parallelism.vocab": "pipeline"},
    ],
    ids=["cp and tp", "cp and pp", "a pipeline in a V", "a shared vocabulary"],
)
def test_no_mapping_changes_the_loss_of_pairs(mapping: dict[str, Any]) -> None:
    """A sample's labels are added up over cp before a function that is not linear."""
    size = 4 if "parallelism.cp" in mapping else 2
    more = {"training.global_batch_size": 8} if mapping.get("pipeline.schedule") == "DualPipeV" else {}
    parity.check(size, PAIRS | mapping | more, steps=1)


@pytest.mark.parametrize(
    "mapping",
    [
        {"parallelism.cp": 2, "parallelism.tp": 2, "training.loss_chunks": 5},
        {"parallelism.pp": 2, "pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4, "model.mtp_depth": 1},
        {"parallelism.tp": 2, "training.loss_chunks": 0},
        {"parallelism.pp": 2, "parallelism.vocab": "pipeline", "model.vocab_size": 49, "training.loss_chunks": 3},
    ],
    ids=["cp and tp, in slices", "zero bubbles and multi-token prediction", "whole logits", "a shared vocabulary"],
)
def test_no_mapping_changes_a_loss_of_entropies(mapping: dict[str, Any]) -> None:
    size = 4 if "parallelism.cp" in mapping else 2
    batch = {"training.objective": entropy_objective.NAME, "training.global_batch_size": 8}
    parity.check(size, batch | mapping, steps=1)


@pytest.mark.parametrize(
    "mapping",
    [
        {"parallelism.cp": 2, "parallelism.tp": 2},
        {"parallelism.pp": 2, "pipeline.schedule": "1F1B"},
        {"parallelism.pp": 2, "parallelism.vocab": "pipeline"},
    ],
    ids=["cp and tp", "a pipeline", "a shared vocabulary"],
)
def test_no_mapping_changes_a_loss_of_weighted_labels(mapping: dict[str, Any]) -> None:
    size = 4 if "parallelism.cp" in mapping else 2
    weighted = {"training.objective": "weighted_cross_entropy", "data.label_weights": True}
    parity.check(size, weighted | {"training.global_batch_size": 4} | mapping, documents=True, steps=1)


def test_weighted_labels_need_weights() -> None:
    with pytest.raises(ConfigError, match=r"reads the weights of labels: set data\.label_weights = true"):
        parity.read({"training.objective": "weighted_cross_entropy"}, 1)


def test_an_objective_refuses_multi_token_prediction_unless_it_says_so() -> None:
    assert parity.read({"model.mtp_depth": 1}, 1).training.objective == "cross_entropy"
    with pytest.raises(ConfigError, match=r"cannot train multi-token prediction, .* use mtp_depth = 0, or objective"):
        parity.read(PAIRS | {"model.mtp_depth": 1}, 1)


def test_what_a_guess_loses() -> None:
    config = Config()
    assert OBJECTIVES.look_up("cross_entropy").uniform_guess_loss(config) == math.log(config.model.vocab_size)
    assert OBJECTIVES.look_up(pair_objective.NAME).uniform_guess_loss(config) == math.inf
