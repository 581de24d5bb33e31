"""Split sizes between ranks, only one of which was rehearsed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from tests.rehearse.small import config_of
from tests.support.case_features import DISPATCHERS
from titanmoe.comm.all_to_all import start_all_to_all
from titanmoe.moe.dispatchers.alltoall import AllToAllExchange
from titanmoe.rehearse.assumed_routing import AssumedRouting, IntegerMessages, balanced, skewed
from titanmoe.rehearse.many_ranks import check_ranks, split_mismatches
from titanmoe.rehearse.message_order import HOST_ORDER
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse

EP4 = {"model.num_layers": 1, "training.global_batch_size": 4, "parallelism.experts.ep": 4, "parallelism.node": 2}


def of(changes: dict[str, Any], routing: float | AssumedRouting = 1.7) -> Rehearsal:
    return rehearse(config_of(EP4 | changes, 4, "h100"), 4, 0, "h100", routing=routing)


@pytest.mark.parametrize("name", ["allgather", "hierarchical"])
def test_split_sizes_are_those_of_the_rehearsed_rank(name: str) -> None:
    rehearsal = of(DISPATCHERS[name])
    splits_sent = [m.splits for m in rehearsal.log.messages if m.op == "all-to-all" and not m.backward]
    assert splits_sent == [(s, r) for _, s, r in rehearsal.exchange.all_to_alls(0, 0, 0)]
    assert not list(split_mismatches([rehearsal]))


def test_a_rank_that_was_not_rehearsed_and_returns_rows_to_the_wrong_ranks_is_named() -> None:
    real = AllToAllExchange.start_combine

    def start_combine(self: AllToAllExchange, y_RD: Tensor) -> Any:
        transfer = self.x_RD.transfer
        if transfer.group.rank != 2:
            return real(self, y_RD)
        return start_all_to_all(y_RD, transfer.group, transfer.receive[::-1], transfer.send)

    with mock.patch.object(AllToAllExchange, "start_combine", start_combine):
        rehearsal = of({})
        assert "rank 2 sends rank 0" in check_ranks([rehearsal]).text
    assert check_ranks([rehearsal]).text == HOST_ORDER


def test_each_layer_is_checked_if_layers_differ() -> None:
    def choose(layer: int, index_T: Tensor) -> Tensor:
        return skewed(index_T, 2, 8, 3.0) if layer else balanced(index_T, 2, 8)

    rehearsal = of({"model.num_layers": 2}, AssumedRouting("one of each", choose, by_layer=True))
    splits = {layer: [s for _, s, _ in rehearsal.exchange.all_to_alls(1, 0, layer)] for layer in (0, 1)}
    assert splits[0] != splits[1]
    rows = [m.splits[0] for m in rehearsal.log.messages if m.op == "all-to-all" and m.site.layer == "layers.1"]
    assert len(set(rows)) > 1 and not list(split_mismatches([rehearsal]))


def test_groups_that_choose_alike_are_checked_once_and_all_others() -> None:
    real, runs = AllToAllExchange.start_combine, []

    def start_combine(self: AllToAllExchange, y_RD: Tensor) -> Any:
        transfer = self.x_RD.transfer
        if transfer.group.rank or len(set(transfer.receive)) == 1:
            return real(self, y_RD)
        return start_all_to_all(y_RD, transfer.group, transfer.receive[::-1], transfer.send)

    def choose(layer: int, index_T: Tensor) -> Tensor:
        return skewed(index_T, 2, 8, 3.0) if index_T[0] >= 7 * 16 else balanced(index_T, 2, 8)

    class Watched(IntegerMessages):
        def all_to_alls(self, rank: int, microbatch: int, layer: int) -> Any:
            runs.append((rank, microbatch))
            return super().all_to_alls(rank, microbatch, layer)

    rehearsal = of({"training.global_batch_size": 8, "parallelism.experts.ep": 2}, AssumedRouting("late", choose))
    rehearsal.exchange.__class__ = Watched
    assert not list(split_mismatches([rehearsal])) and runs == [(0, 0), (1, 0), (2, 1), (3, 1)]
    with mock.patch.object(AllToAllExchange, "start_combine", start_combine):
        assert "microbatch 1: rank 2 sends rank 2" in next(split_mismatches([rehearsal]))
