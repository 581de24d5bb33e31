"""A layer's statistics have names, and one that is added in one place is summed and reported."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import parity, world
from titanmoe.config.schema import MoE
from titanmoe.moe import layer_statistics
from titanmoe.moe.balance_losses.balance_loss import RouterOutput
from titanmoe.moe.layer_statistics import LayerStatistics, RowLayout, Statistic, StepCounts, step_metrics


def largest_scores(routed: RouterOutput) -> Tensor:
    return routed.scores_TE.amax(-1) @ routed.valid_T


MEAN_LARGEST = Statistic(
    "largest_score", lambda layer: layer.counts["largest"] / layer.counts["tokens"], ("largest",), largest_scores
)


def report_with_it(changes: dict[str, Any]) -> dict[str, Any]:
    """On a rank: what is reported of a first step."""
    with mock.patch.object(layer_statistics, "STATISTICS", [*layer_statistics.STATISTICS, MEAN_LARGEST]):
        return parity.make_trainer(changes, loader=parity.samples()).train_step()


def test_one_that_is_added_in_one_place_is_in_the_metrics() -> None:
    changes = {"moe.aux_loss": 0.01, "training.global_batch_size": 2}
    (alone,) = world.run(1, report_with_it, changes)
    of_layers = [value for name, value in alone.items() if name.endswith(".largest_score")]
    assert of_layers and all(0 < value < 1 for value in of_layers)
    assert alone["largest_score"] == pytest.approx(sum(of_layers) / len(of_layers))
    for report in world.run(2, report_with_it, changes | {"parallelism.experts.ep": 2}):
        assert report["largest_score"] == pytest.approx(alone["largest_score"], rel=1e-6)


def test_a_row_is_read_by_name_whatever_losses_are_on() -> None:
    layout = RowLayout.of(3, MoE(z_loss=0.1, aux_loss=0.2))
    counts = StepCounts(layout, 2)
    for m in range(2):
        counts.record_load(torch.tensor(m), torch.tensor([[1, 0, 2], [0, 4, 0]]))
        counts.record(torch.tensor(m), ("dropped",), torch.tensor(1))
        counts.record(torch.tensor(m), ("z_loss",), torch.tensor(0.5))
        counts.record(torch.tensor(m), ("entropy", "tokens"), torch.tensor([6.0, 3.0]))
    got = layout.read(counts.counts_MX.sum(0).tolist())
    assert got == LayerStatistics(
        [2, 8, 4], {"aux_loss": 0.0, "z_loss": 1.0}, {"entropy": 12.0, "tokens": 6.0, "dropped": 2.0}
    )
    counts.begin_step()
    assert not counts.counts_MX.any()


def test_metrics_of_a_step() -> None:
    """A sum for the losses, the greatest imbalance, and means of the others; of each layer besides."""
    one = LayerStatistics([1.0, 3.0], {"z_loss": 0.25}, {"entropy": 4.0, "tokens": 2.0, "dropped": 1.0})
    two = LayerStatistics([0.0, 0.0], {"z_loss": 0.5}, {"entropy": 0.0, "tokens": 0.0, "dropped": 0.0})
    values = step_metrics({1: one, 4: two})
    together = {"z_loss": 0.75, "imbalance": 1.5, "router_entropy": 1.0, "dropped_fraction": 0.125}
    assert {name: value for name, value in values.items() if "." not in name} == together
    assert values["layers.1.load"] == [1.0, 3.0] and values["layers.1.tokens_max"] == 3.0
    assert values["layers.4.imbalance"] == 1.0 and values["layers.4.dropped_fraction"] == 0.0
    assert step_metrics({}) == {}
