"""Stated routing, and the row counts that ranks send each other."""

from __future__ import annotations

import pytest
import torch

from tests.rehearse.small import config_of
from titanmoe.fold.degrees import derive
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.rehearse.assumed_routing import IntegerMessages, Routing, balanced, skewed, with_imbalance
from titanmoe.rehearse.rehearsal import FakeLoader


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0])
def test_the_busiest_expert_has_its_multiple_of_the_mean(factor: float) -> None:
    chosen_TK = skewed(torch.arange(4800), 2, 8, factor)
    load_E = torch.bincount(chosen_TK.flatten(), minlength=8)
    assert load_E.argmax() == 0 and load_E[0] / (2 * 4800 / 8) == pytest.approx(factor, rel=0.01)
    assert (chosen_TK.sort(1).values.diff(dim=1) > 0).all()  # no expert twice
    assert load_E[1:].max() < 1.1 * load_E[1:].min()


def test_at_the_largest_imbalance_other_experts_have_no_token() -> None:
    load_E = torch.bincount(skewed(torch.arange(16), 2, 8, 4.0).flatten(), minlength=8)
    assert load_E.tolist() == [16, 16, 0, 0, 0, 0, 0, 0]


def test_balanced_routing_is_that_of_force_balance() -> None:
    assert torch.bincount(balanced(torch.arange(16), 2, 8).flatten()).tolist() == [4] * 8


@pytest.mark.parametrize("imbalance", [1.0, 2.0, 4.0])
def test_every_rank_receives_the_counts_that_others_send(imbalance: float) -> None:
    config = config_of({"parallelism.tp": 2, "parallelism.experts.ep": 4}, 4, "cpu")
    routing = Routing(config, derive(4, config.parallelism), FakeLoader, with_imbalance(config, imbalance))
    exchange = IntegerMessages(routing, AllToAll, AllToAll(8, "torch"), 8)
    for rank in range(4):
        counts = exchange.received_integers(rank, 0, 0, 0)
        for other in range(4):
            load_E = torch.bincount(routing.chosen_experts(other, 0, 0).flatten(), minlength=8)
            assert counts[other].flatten().tolist() == load_E[2 * rank : 2 * rank + 2].tolist()
