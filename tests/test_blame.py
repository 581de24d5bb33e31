"""A parity failure names the tensors, the ranks and the axis, for faults planted in real steps and for made-up ones."""

from __future__ import annotations

import pytest
import torch

from tests import parity, world
from tests.support.blame import HeldShard, describe_failure, describe_wrong_gradients, describe_wrong_replicas
from titanmoe.config.schema import Experts, Parallelism
from titanmoe.fold.degrees import derive
from titanmoe.fold.rank_groups import coordinates

MAPPING = {"parallelism.tp": 2, "parallelism.cp": 2, "parallelism.experts.ep": 4, "training.global_batch_size": 2}


def failure(fault: str) -> list[str]:
    with pytest.raises((AssertionError, world.RankError)) as failed:
        parity.check(4, MAPPING, fault=fault, steps=1)
    return str(failed.value).splitlines()


def test_a_missing_sum_shows_in_the_ranks_that_differ() -> None:
    lines = failure("router_not_reduced_over_tp")
    (wrong,) = (line for line in lines if line.startswith("  layers.0.moe.router.weight: "))
    assert "on ranks [0, 1, 3] (cp `sum_replicated`, tp `sum_replicated`)" in wrong
    assert "; ranks [0, 1, 3] differ in one piece" in wrong
    assert "AssertionError: replicas of layers.0.moe.router.weight differ by " in "\n".join(lines)
    (suspected,) = (line for line in lines if line.startswith("suspected axis"))
    same = "ranks [0, 1, 3] have the same piece of layers.0.moe.router.weight"
    assert suspected == f"suspected axis: tp ({same} and differ along this axis)"


def test_a_factor_points_to_the_axis_of_that_size() -> None:
    lines = failure("expert_gradients_scaled_by_ep")
    assert "grads is off by 3.00e+00" in lines[0] and lines[0].endswith("of gradients, 6 of 23 tensors are wrong:")
    assert all(".moe.experts." in line and "; 4 times what it should be" in line for line in lines[1:7])
    (suspected,) = lines[7:]
    assert suspected.startswith("suspected axis: ep (") and suspected.endswith(
        " is 4 times what it should be, and ep is 4)"
    )


# ---- made up: a model of three tensors on 8 ranks

FOLD = derive(8, Parallelism(tp=2, cp=2, dp_shard=2, experts=Experts(ep=2)))
WHOLE = {name: torch.arange(1.0, 33.0).view(8, 4) for name in ("norm", "wq", "expert")}


def pieces() -> list[dict[str, HeldShard]]:
    """norm: cut over dp_shard x cp. wq: over tp as well. expert: over ep and edp."""
    out = []
    for rank in range(8):
        at, experts = coordinates(FOLD, "attention", rank), coordinates(FOLD, "experts", rank)
        shard = 2 * (2 * at["dp_shard"] + at["cp"])
        cuts = {"dp_shard": True, "cp": True}
        out.append(
            {
                "norm": HeldShard((shard, 0), (2, 4), "attention", cuts | {"tp": False}),
                "wq": HeldShard((shard, 2 * at["tp"]), (2, 2), "attention", cuts | {"tp": True}),
                "expert": HeldShard(
                    (2 * experts["edp"], 2 * experts["ep"]), (2, 2), "experts", {"edp": True, "ep": True}
                ),
            }
        )
    return out


def report(**wrong: torch.Tensor) -> list[str]:
    return describe_wrong_gradients(FOLD, pieces(), WHOLE | wrong, WHOLE, 1e-10).splitlines()


def test_errors_at_one_position_of_an_axis_point_to_it() -> None:
    wrong = WHOLE["wq"].clone()
    wrong[:, 2:] += torch.rand(8, 2)
    lines = report(wq=wrong)
    assert lines[0] == "1 of 3 tensors are wrong:" and "on ranks [1, 3, 5, 7] (dp_shard FSDP" in lines[1]
    assert lines[2:] == ["suspected axis: tp (wq is wrong only where tp is [1])"]


def test_what_only_the_wrong_tensors_have_in_common_points_to_the_axis() -> None:
    lines = report(norm=torch.rand(8, 4))
    assert lines[2:] == ["suspected axis: tp (all wrong tensors and no right one have it: `sum_replicated`)"]
    lines = report(expert=torch.rand(8, 4))
    assert [line.partition(" (")[0] for line in lines[2:]] == ["suspected axis: edp", "suspected axis: ep"]


def test_axes_that_cannot_be_told_apart_are_all_named() -> None:
    lines = report(**{name: torch.rand(8, 4) for name in WHOLE})
    assert lines[4:] == ["suspected axis: any of dp_shard, cp, tp, edp, ep; they cannot be told apart"]
    alone = derive(1, Parallelism())
    mine = [{"norm": HeldShard((0, 0), (8, 4), "attention", {})}]
    text = describe_failure(alone, mine, lambda name, rank, one: 1.0, 1e-10)
    assert text.splitlines()[1:] == [
        "  norm: 1.0e+00 on ranks [0], all that have it (not split)",
        "suspected axis: none, because no axis has several ranks",
    ]


def test_a_nan_in_one_replica_is_a_difference() -> None:
    gathered = [{name: (WHOLE[name][one.place].clone(), one) for name, one in mine.items()} for mine in pieces()]
    assert describe_wrong_replicas(FOLD, gathered, 1e-12) == ""
    gathered[6]["norm"][0][0, 0] = torch.nan
    text = describe_wrong_replicas(FOLD, gathered, 1e-12)
    assert text.startswith("replicas of norm differ by inf; 1 of 3 tensors are wrong:")
    assert "norm: inf on ranks [6, 7] (" in text and "; ranks [6, 7] differ in one piece" in text
    assert text.splitlines()[-1].startswith("suspected axis: tp (ranks [6, 7] have the same piece of norm ")
