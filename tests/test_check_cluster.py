"""The check of a cluster: what is right passes, what is wrong is named, what cannot run is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import world
from tests.support import planted_faults, processes
from tests.support.fake_gpu import GPU, FakeGPU
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.schema import Experts, Parallelism
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import build_meshes
from titanmoe.launcher import check_cluster
from titanmoe.rehearse.rehearsal import fake_world
from titanmoe.train.runtime import Runtime

SMALL = {"model.num_layers": 1, "training.seq_len": 16}


def alone(ranks: int) -> list[float]:
    from tests.parity import runtime_here

    with mock.patch.dict(check_cluster.BASE, SMALL):
        config = check_cluster.read_config(check_cluster.command_line(ranks, {}, "cpu"), 1, COMPONENTS)
    return check_cluster.run_steps(config, runtime_here())[0]


def checked(expected: list[float], only: list[str], fault: str) -> dict[str, Any]:
    from tests.parity import runtime_here

    undo = planted_faults.FAULTS[fault]() if fault else lambda: None
    known = mock.patch.object(check_cluster, "run_steps_on_one_rank", lambda world, device: expected)
    try:
        with known, mock.patch.dict(check_cluster.BASE, SMALL):
            return check_cluster.check(runtime_here(), only, "")
    finally:
        undo()


def test_a_fit_cluster_and_one_whose_sums_are_wrong() -> None:
    expected = world.run(1, alone, 2)[0]
    result = world.run(2, checked, expected, ["tensor parallel", "pairs"], "")[0]
    assert result["problems"] == []
    rows = {row.name: row for row in result["rows"]}
    assert rows.pop("pipeline, DualPipeV in pairs").skipped.startswith("parallelism.experts.ep = 2 does not divide")
    assert rows.keys() == {"tensor parallel", "expert tensor parallel"}
    assert all(row.error < 1e-5 and row.is_ok for row in rows.values())
    axes = {(wire.axis, wire.message) for wire in result["wires"]}
    assert axes == {("tp", "all-gather"), ("tp", "reduce-scatter"), ("ep x etp", "all-to-all")}
    assert all(wire.microseconds > 0 and wire.gigabytes > 0 for wire in result["wires"])

    result = world.run(2, checked, expected, ["tensor parallel"], "router_not_reduced_over_tp")[0]
    (problem,) = result["problems"]
    assert problem.startswith("tensor parallel is off by ")


def timed(node: int) -> list[tuple[str, int]]:
    from tests.parity import runtime_here

    fold = derive(4, Parallelism(experts=Experts(ep=4)))
    wires = check_cluster.time_axes(build_meshes(fold, "cpu", node), runtime_here())
    return [(wire.axis, wire.ranks) for wire in wires if wire.message == "all-to-all"]


def test_both_hops_of_a_dispatcher_that_works_by_node_are_timed() -> None:
    assert world.run(4, timed, 2)[0] == [("ep x etp in a node", 2), ("ep between nodes", 2)]
    assert world.run(4, timed, -1)[0] == [("ep x etp", 4)]


def test_words_that_name_no_case_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--only dispatchers names none of the cases .*dispatcher hierarchical"):
        check_cluster.compare(Runtime(0, 0, 2, torch.device("cpu")), ["dispatchers"], 2, [])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
def test_every_case_under_torchrun(ranks: int, tmp_path: Path) -> None:
    """One rank's numbers come from a process of its own."""
    out = tmp_path / "found.json"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = processes.run([*command, "-m", "titanmoe.launcher.check_cluster", "--json", str(out)], timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.rstrip().endswith("this cluster is fit")
    result = json.loads(out.read_text())
    skipped = {row["name"] for row in result["rows"] if row["skipped"]}
    assert result["problems"] == [] and len(result["rows"]) == 19
    assert not skipped if ranks == 8 else skipped and "dispatcher symm_mem" not in skipped


def test_on_a_gpu_messages_are_over_when_the_clock_is_read() -> None:
    sent: list[int] = []
    with fake_world(0, 2), FakeGPU(2) as gpu:
        runtime = Runtime(0, 0, 2, GPU)
        mesh = build_meshes(derive(2, Parallelism()), "cuda")
        group = check_cluster._fsdp_group(mesh.dense_data)
        send = check_cluster.build_collectives(group, 1 << 12, GPU)["all-gather"]
        assert check_cluster.seconds_per_call(runtime, lambda: sent.append(gpu.host_waits) or send(), 3) > 0
        # Two to warm up, three that are timed. The host waits before and after these, and then for the slowest group.
        assert sent == [0, 0, 1, 1, 1] and gpu.host_waits == 3
        assert gpu.races == []
        assert check_cluster.versions(runtime)[1].endswith(", NCCL 2.28.9")
