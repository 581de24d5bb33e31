"""Pairs of a forward and a backward that take turns: what is allowed, and that no number changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import parity, world
from tests.fold.test_pipeline_schedules import table, write
from tests.parallel.test_pipeline import forward_alone
from tests.train.test_watch import named
from titanmoe.comm import all_to_all, interleave
from titanmoe.comm.interleave import InterleavedPair
from titanmoe.config.schema import Config, Model, MoE, Pipeline
from titanmoe.fold.schedule_laws import pair_violations, schedule_violations
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.parallel.pairs import Action, Pairs

PP = {"parallelism.pp": 2, "model.num_layers": 4, "training.global_batch_size": 8}
V = PP | {"pipeline.schedule": "DualPipeV"}

# Looped stages: 0 and 2 on one rank, 1 and 3 on the other. No backward is split.
PAIR = "({};{})OVERLAP_F_B".format
LOOPS = [
    [PAIR(*action.split("+")) if "+" in action else action for action in row.split()]
    for row in (
        "0F0 0F1 2F0 2F1 0F2+2B0 0F3+2B1 2F2+0B0 2F3+0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1+3F2 3B2 3F3+1B2 3B3 1B3",
    )
]


def problems_of(pipeline: dict[str, Any], ep: int = 2, moe: dict[str, Any] | None = None) -> list[str]:
    config = Config(model=Model(num_layers=4), pipeline=Pipeline(**pipeline), moe=MoE(overlap="pairs", **(moe or {})))
    config.training.local_batch_size = 1
    of_parts = DISPATCHERS.look_up(config.moe.dispatcher).violations(config, {"pp": 2, "ep": ep, "etp": 1})
    return [*schedule_violations(config, 2, 2, 4), *pair_violations(config, 2, ep, 1), *of_parts]


# ---- what cannot run


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_schedule_without_pairs_is_refused(schedule: str) -> None:
    (problem,) = problems_of(dict(schedule=schedule))
    assert f"pairs of a forward and a backward, and {schedule} has none: set pipeline.schedule = DualPipeV" in problem


@pytest.mark.parametrize("dispatcher", ["allgather", "symm_mem"])
def test_a_dispatcher_that_never_waits_for_rows_is_refused(dispatcher: str) -> None:
    (problem,) = problems_of(dict(schedule="DualPipeV"), moe=dict(dispatcher=dispatcher))
    assert f'moe.dispatcher = "{dispatcher}" has no such place: use dispatcher = "alltoall" or' in problem


def test_all_problems_are_reported_at_once() -> None:
    found = problems_of(dict(), 1, dict(dispatcher="allgather"))
    assert ["has none" in found[0], "ep * etp = 1" in found[1], "allgather" in found[2]] == [True] * 3
    assert len(found) == 3


def test_pairs_of_a_file_are_of_two_stages_and_whole(tmp_path: Path) -> None:
    assert problems_of(dict(schedule_csv=write(tmp_path / "loops.csv", LOOPS))) == []

    def refused(name: str, rows: list[list[str]], message: str) -> None:
        path = write(tmp_path / name, rows)
        (problem,) = problems_of(dict(schedule_csv=path))
        assert f"{path} {message}" in problem

    first, last = table(2, 4)
    refused("none.csv", [first, last], "has none: set pipeline.schedule = DualPipeV")
    refused("same.csv", [[*first[:1], PAIR(*first[1:3]), *first[3:]], last], 'has "(0F1;0B0)OVERLAP_F_B": pair other')
    split = [row.copy() for row in LOOPS]
    split[0][4:5] = [PAIR("0F2", "2I0"), "2W0"]
    refused("split.csv", split, 'has "(0F2;2I0)OVERLAP_F_B": pair other actions')


def test_what_runs_has_no_problems() -> None:
    assert problems_of(dict(schedule="DualPipeV")) == []


# ---- on ranks


def measured(
    changes: dict[str, Any], documents: bool = False, steps: int = 1
) -> tuple[parity.Outcome | None, list[int]]:
    """Also returns how often each side waited for its turn."""
    waits, yield_if_sent = [0, 0], InterleavedPair.yield_if_sent

    def counted(self: InterleavedPair) -> None:
        waits[self.turn] += self.has_sent[self.turn] and not self.over[1 - self.turn]
        yield_if_sent(self)

    InterleavedPair.yield_if_sent = counted  # type: ignore[method-assign]
    try:
        return parity.measure(changes, documents, steps=steps), waits
    finally:
        InterleavedPair.yield_if_sent = yield_if_sent  # type: ignore[method-assign]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


DENSE = {"model.num_dense_layers": 1, "model.dense_hidden": 16}
CASES = {
    "tp, a stage without MoE layers": DENSE | {"parallelism.tp": 2},
    "cp, a shared expert, moe again": {
        "training.global_batch_size": 6,
        "parallelism.cp": 2,
        "model.shared_hidden": 16,
        "activation_checkpoint.mode": "moe",
        "moe.aux_loss_global": 0.02,
        "moe.z_loss": 0.01,
    },
    "one expert a token, dropping, full again": {
        "model.top_k": 1,
        "model.norm_topk": False,
        "moe.capacity_factor": 1.0,
        "moe.capacity_scope": "full_sequence",
        "moe.aux_loss": 0.02,
        "activation_checkpoint.mode": "full",
    },
    "across nodes, padded bins, selective": {
        "moe.dispatcher": "hierarchical",
        "parallelism.node": 1,
        "moe.capacity_factor": 1.0,
        "moe.pad_to_capacity": True,
        "moe.bias_update_rate": 0.05,
        "activation_checkpoint.mode": "selective",
    },
    "etp, tied, a further token": {
        "parallelism.experts.ep": 1,
        "parallelism.experts.etp": 2,
        "model.tie_embeddings": True,
        "model.mtp_depth": 1,
    },
}


def check(changes: dict[str, Any], documents: bool = False, timeout: float = 300) -> None:
    """The plain model's numbers, and bit-equal to a run without turns."""
    on, off = ({"moe.overlap": overlap} | changes for overlap in ("pairs", "none"))
    steps = 2 if "moe.bias_update_rate" in changes else 1
    results = world.run(4, measured, on, documents, steps, timeout=timeout)
    got, _ = results[0]
    errors = parity.compare(got, parity.expected(changes, 4, documents, steps), parity.read(on, 4))
    assert max(errors.values()) <= parity.TOLERANCE["float64"], errors
    waits = [waits for _, waits in results]
    assert all(map(sum, waits)) and all(max(waits)), waits
    apart, waits = world.run(4, measured, off, documents, steps, timeout=timeout)[0]
    assert waits == [0, 0]
    assert same(got.grads, apart.grads) and same(got.weights, apart.weights) and same(got.bias, apart.bias)
    assert got.loss == apart.loss and got.norm == apart.norm and got.reports == apart.reports


@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "_"))
def test_turns_change_no_number(case: str) -> None:
    changes = V | {"parallelism.experts.ep": 2} | CASES[case]
    check(changes, documents=case.startswith("cp"))


@pytest.mark.slow
def test_turns_beside_compiled_parts() -> None:
    compiled = {"compile.enable": True, "compile.backend": "aot_eager", "parallelism.experts.ep": 2}
    check(V | compiled | {"activation_checkpoint.mode": "moe"}, timeout=300)


def test_pairs_of_a_file_agree_too(tmp_path: Path) -> None:
    """With weights that are freed between forward and backward."""
    path = write(tmp_path / "loops.csv", LOOPS)
    check(
        PP | {"pipeline.schedule_csv": path, "parallelism.experts.ep": 2, "parallelism.reshard_after_forward": "always"}
    )


def test_forward_alone_knows_no_pairs() -> None:
    changes = V | {"parallelism.experts.ep": 2, "moe.overlap": "pairs"}
    alone, training, grads, _ = world.run(4, forward_alone, changes)[0]
    assert alone == training
    assert parity.worst_error(grads, parity.expected(changes, 4).steps[0].grads)[0] <= parity.TOLERANCE["float64"]


def test_the_header_names_them_and_a_trace_shows_both_halves(tmp_path: Path) -> None:
    changes = V | {"parallelism.experts.ep": 2, "moe.overlap": "pairs"}
    assert (
        "pairs of forward and backward take turns"
        in world.run(4, header, changes | {"model.vocab_size": 320})[0]["pipeline"]
    )
    world.run(4, named, changes | {"profile.steps": [1], "job.dump_folder": str(tmp_path)})
    (trace,) = (tmp_path / "profile").glob("*.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    threads = {event["tid"] for event in events if event.get("name") == "_StartBackward"}
    assert len(threads) == 2, threads  # backward on its own, and as half of a pair


def header(changes: dict[str, Any]) -> dict[str, str]:
    return parity.make_trainer(changes).training.setup_rows


class Broken(RuntimeError):
    pass


def breaks(side: int) -> None:
    launch, sends = all_to_all._Transfer.launch, []

    def failing(self: all_to_all._Transfer, *args: Any) -> torch.Tensor:
        if interleave._active_pair is not None and interleave._active_pair.turn == side:
            sends.append(1)
            if len(sends) == 2:
                raise Broken(f"side {side}")
        return launch(self, *args)

    all_to_all._Transfer.launch = failing  # type: ignore[method-assign]
    parity.measure(V | {"parallelism.experts.ep": 2, "moe.overlap": "pairs"}, steps=1)


@pytest.mark.parametrize("side", [0, 1], ids=["forward", "backward"])
def test_an_error_in_one_half_ends_the_step_with_it(side: int) -> None:
    with pytest.raises(world.RankError) as caught:
        world.run(4, breaks, side)
    assert caught.value.failures and not caught.value.stuck
    for trace in caught.value.failures.values():
        assert f"Broken: side {side}" in trace and "OtherSideFailed" not in trace, trace


def test_forward_is_first_in_whatever_order_a_file_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(Pairs, "_ready", lambda self, part, context: part.computation_type.name)
    monkeypatch.setattr(Pairs, "_for_other_thread", lambda self, work: work)
    pairs = Pairs(torch.device("cpu"))
    monkeypatch.setattr(pairs.turns, "run", lambda *sides: order.append(sides))
    for text in (PAIR("0F2", "2B1"), PAIR("2B1", "0F2")):
        pairs(Action.from_str(text), None)
    assert order == [("FORWARD", "FULL_BACKWARD")] * 2
