"""The dispatcher over DeepEP, on its package emulated by contract."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import parity, world
from tests.moe.test_dispatch import CASES, LAYOUTS, E, arriving, inputs, plain, whole_world
from tests.moe.test_symmetric import check_round_trip, round_trip
from tests.support import emulated_deep_ep
from tests.support.dispatched import dispatched
from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.experiments.deepep import DeepEP
from titanmoe.experiments.deepep_spec import DeepEPSpec
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.rehearse.rehearsal import recipe_to_rehearse
from titanmoe.train import launch

ROOT = Path(__file__).resolve().parents[2]
HERE = {"moe.dispatcher": "deepep", "training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
HERE |= {"training.mixed_precision_reduce": "float32"}


def make(group: Group, ep: int, etp: int) -> DeepEP:
    mapping = {"parallelism.experts.ep": ep, "parallelism.experts.etp": etp}
    dispatcher = DeepEP(E)
    ranks = ExpertRanks(group, ep, etp)
    dispatcher.place(ranks)
    config = parity.read(HERE | mapping, group.size)
    dispatcher.memory = DeepEP.reserve(config.model, config.moe, ranks, 0, torch.bfloat16, torch.device("cpu"))
    return dispatcher


def cases_on_ranks(ep: int, etp: int) -> None:
    dispatcher = make(whole_world(), ep, etp)
    group, local = dispatcher.group, dispatcher.local_experts
    for case in CASES:
        before = len(emulated_deep_ep.calls)
        x_TD, weights_TK, chosen_TK = inputs(case, group.rank)
        rows, weights, count_e, _ = dispatched(dispatcher, x_TD, weights_TK, chosen_TK)
        first = group.rank // etp * local
        want, counts = arriving(case, group.size, range(first, first + local))
        assert count_e.tolist() == counts
        assert list(zip(rows[:, 0].tolist(), weights[:, 0].tolist(), strict=True)) == want
        check_round_trip(dispatcher, case)
        twice = ["layout", "dispatch", "layout", "dispatch", "combine", "dispatch again", "combine"]
        assert emulated_deep_ep.calls[before:] == twice


@pytest.mark.parametrize(("ep", "etp"), [*LAYOUTS, (2, 1)])
def test_tokens_arrive_once_and_come_back(ep: int, etp: int) -> None:
    """Also with no token for an expert, all for one, and none at all."""
    world.run(ep * etp, cases_on_ranks, ep, etp)


@pytest.mark.parametrize("memory", [False, True])
def test_without_a_loan_or_alone_it_is_alltoall(memory: bool) -> None:
    dispatcher = make(NO_GROUP, 1, 1) if memory else DeepEP(E)
    assert dispatcher.memory is None
    before = len(emulated_deep_ep.calls)
    y_TD, *_ = round_trip(dispatcher, "some_dropped")
    torch.testing.assert_close(y_TD, plain(*inputs("some_dropped", 0)))
    assert len(emulated_deep_ep.calls) == before


def any_dtype() -> Any:
    """The emulation sends what the real kernels cannot."""
    return mock.patch.object(DeepEPSpec, "param", "")


def measured(changes: dict[str, Any]) -> Any:
    before = len(emulated_deep_ep.calls)
    with any_dtype():
        return parity.measure(changes, steps=1), len(emulated_deep_ep.calls) - before


@pytest.mark.parametrize(
    "more",
    [
        {"parallelism.tp": 2, "activation_checkpoint.mode": "full"},
        {"parallelism.pp": 2, "pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4, "moe.capacity_factor": 1.0}
        | {"moe.drop_policy": "position"},
    ],
    ids=["tp, all again", "V, dropping"],
)
def test_training_with_it_changes_no_number(more: dict[str, Any]) -> None:
    changes = {"moe.dispatcher": "deepep", "parallelism.experts.ep": 2, "training.global_batch_size": 4} | more
    changes |= {"model.shared_hidden": 16}
    with any_dtype():
        results = world.run(4, measured, changes)
        want, config = parity.expected(changes, 4, steps=1), parity.read(changes, 4)
    assert all(times > 0 for _, times in results)
    errors = parity.compare(results[0][0], want, config)
    assert max(errors.values()) <= parity.TOLERANCE["float64"]


def losses(changes: dict[str, Any]) -> list[float]:
    trainer = parity.make_trainer(changes, loader=parity.samples())
    return [trainer.train_step()["loss"] for _ in range(2)]


def test_in_bfloat16_it_is_near_alltoall() -> None:
    changes = HERE | {"parallelism.experts.ep": 2, "training.global_batch_size": 4}
    assert world.run(2, losses, changes)[0] == pytest.approx(
        world.run(2, losses, changes | {"moe.dispatcher": "alltoall"})[0], rel=1e-2
    )


@pytest.mark.parametrize(
    ("more", "world_size", "said"),
    [
        ({"training.mixed_precision_param": "float32"}, 2, 'sends bfloat16 alone, .*mixed_precision_param = "float32"'),
        ({"moe.router_dtype": "float64"}, 2, 'in float32, and moe.router_dtype = "float64"'),
        ({"model.dim": 24}, 2, "sends multiples of 16 numbers, at most 8176, and model.dim is 24"),
        ({"model.dim": 8192}, 2, "at most 8176, and model.dim is 8192"),
        ({"moe.pad_to_capacity": True, "moe.capacity_factor": 1.0}, 2, 'and moe.dispatcher = "deepep" has none'),
        ({"moe.overlap": "halves", "training.local_batch_size": 2}, 2, "sends a token once for all its experts"),
        (
            {"parallelism.experts.ep": 6, "model.num_experts": 12},
            6,
            r"made for 2, 4, .* ranks, and ep \* etp = 6 \* 1 is 6",
        ),
        ({"parallelism.experts.etp": 32}, 64, r"at most 32 copies of a token, and model.top_k \* etp = 2 \* 32 is 64"),
        ({"parallelism.experts.ep": 8, "parallelism.node": 4}, 8, "within a node, or nodes of 8 ranks, .* nodes of 4"),
    ],
)
def test_what_it_cannot_do_is_refused(more: dict[str, Any], world_size: int, said: str) -> None:
    wide = {"model.expert_hidden": 64, "training.global_batch_size": 64}
    with pytest.raises(ConfigError, match=said):
        parity.read(HERE | {"parallelism.experts.ep": 2, "training.seq_len": 64} | wide | more, world_size)


def test_a_machine_without_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rehearsal too, which has no kernels of others. A group of one rank sends nothing, so it needs nothing."""
    ask = ["--config", str(ROOT / "train_configs/debug.toml"), "--parallelism.tp", "1", "--moe.dispatcher", "deepep"]
    ask += ["--training.mixed_precision_param", "bfloat16", "--parallelism.experts.ep"]
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert launch.read_config([*ask, "1"], 2, COMPONENTS).moe.dispatcher == "deepep"
    lacks = (
        "cannot run here: the package deep_ep cannot be loaded .*: build it as https://github.com/deepseek-ai/DeepEP"
    )
    with pytest.raises(ConfigError, match=lacks):
        launch.read_config([*ask, "2"], 2, COMPONENTS)
    with pytest.raises(ConfigError, match='"deepep" cannot run here: no fake group has the kernels of DeepEP'):
        recipe_to_rehearse([*ask, "2"], 2, "h100")
