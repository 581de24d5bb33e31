"""What is recorded in real steps: loads, times, names in a trace. Recording changes no number."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import parity, world
from tests.support.case_features import MODELS
from tests.support.event_order import Clock
from tests.support.fake_gpu import GPU, FakeGPU
from titanmoe.config.laws import contradictions
from titanmoe.train import metrics, timing
from titanmoe.train.refusals import refusals


def run(changes: dict[str, Any]) -> None:
    """The whole loop, as train.py runs it, with a clock that counts how often it is read."""
    with mock.patch.object(timing, "time", Clock(1.0)), mock.patch.object(metrics, "time", timing.time):
        parity.make_trainer(changes).train()


def broken(changes: dict[str, Any]) -> None:
    parity.make_trainer(changes, loader=parity.NaNPositions).train()


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    base = {"job.dump_folder": str(folder), "job.name": "run", "training.steps": 3, "model.vocab_size": 320}
    base |= {"training.global_batch_size": 4}
    return base | {key.replace("__", "."): value for key, value in changes.items()}


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def test_loads_and_times_reach_the_files_under_any_mapping(tmp_path: Path) -> None:
    mappings = {
        1: {},
        4: {"parallelism.pp": 2, "parallelism.experts.ep": 2, "checkpoint.enable": True, "checkpoint.interval": 2},
    }
    for ranks, mapping in mappings.items():
        world.run(ranks, run, small(tmp_path / str(ranks)) | mapping)
    alone, folded = (read(tmp_path / str(ranks), "experts.jsonl") for ranks in mappings)
    assert [line["step"] for line in alone] == [1, 2, 3]
    assert alone == folded
    tokens = [line["tokens"] for line in read(tmp_path / "1", "metrics.jsonl")]
    for line, routed in zip(alone, tokens, strict=True):
        assert [sum(load) for load in line["load"].values()] == [2 * routed] * 2  # top_k 2

    for line in read(tmp_path / "4", "metrics.jsonl")[1:]:
        parts = {
            name: line[f"time.{name}"] for name in ("data", "forward_backward", "optimizer", "checkpoint", "other")
        }
        assert sum(parts.values()) == pytest.approx(line["step_time_s"], abs=2)  # for the reads of the clock in between
        assert 0 < line["time.dispatch"] < parts["forward_backward"]
    events = [(line["step"], line["kind"]) for line in read(tmp_path / "4", "events.jsonl")]
    assert events == [(0, "start"), (2, "save"), (3, "save")]


def test_a_resumed_run_says_so_and_a_failed_one_says_why(tmp_path: Path) -> None:
    saving = small(tmp_path) | {"checkpoint.enable": True, "checkpoint.interval": 0}
    world.run(1, run, saving | {"training.steps": 1})
    world.run(1, run, saving)
    with pytest.raises(world.RankError, match="NonFinite"):
        world.run(1, broken, saving | {"training.steps": 9})
    events = read(tmp_path, "events.jsonl")
    kinds = [(line["step"], line["kind"]) for line in events]
    assert kinds == [(0, "start"), (1, "save"), (1, "restart"), (3, "save"), (3, "restart"), (4, "stop")]
    assert "Lower optimizer.lr" in events[-1]["text"]
    assert [line["step"] for line in read(tmp_path, "experts.jsonl")] == [1, 2, 3]


def test_a_trace_names_the_parts_of_a_step(tmp_path: Path) -> None:
    profiled = {"profile.steps": [2], "profile.ranks": [1], "parallelism.experts.ep": 2, "model.shared_hidden": 16}
    profiled |= {"training.steps": 2, "model.num_layers": 1}
    world.run(2, run, small(tmp_path) | profiled)
    (trace,) = (tmp_path / "run" / "profile").glob("*.json.gz")
    assert trace.name == "step-2-rank-1.json.gz"
    with gzip.open(trace, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"attention", "router", "permute", "dispatch", "experts", "shared expert", "combine", "optimizer"} <= names
    # The longest operations; which ones these are depends on what else the machine does.
    assert "Self CPU time total" in (trace.parent / "step-2-rank-1.txt").read_text()
    (event,) = (line for line in read(tmp_path, "events.jsonl") if line["kind"] == "profile")
    assert event["step"] == 2 and "ui.perfetto.dev" in event["text"]


def named(changes: dict[str, Any]) -> Any:
    """parity.measure of a trainer whose parts are named and whose every step is profiled."""
    from titanmoe.train.timing import Profiler

    profilers = []

    def watch(trainer: Any) -> None:
        folder, training = Path(changes["job.dump_folder"]), trainer.training
        all_threads = training.gradients.engine.pairs is not None
        profilers.append(Profiler(training.profile, folder, training.runtime, all_threads))

    def watched(trainer: Any) -> dict[str, Any]:
        with profilers[0].step(trainer.step + 1):
            return trainer.train_step()

    return parity.measure(changes, prepare=watch, train_step=watched)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"parallelism.experts.ep": 2, "activation_checkpoint.mode": "full"},
        pytest.param(
            MODELS["deepseek_v3"] | {"compile.enable": True, "compile.backend": "aot_eager"}, marks=pytest.mark.slow
        ),
    ],
    ids=["recomputed", "compiled"],
)
def test_profiling_changes_no_number(case: dict[str, Any], tmp_path: Path) -> None:
    case = case | {"model.num_layers": 1}
    watched = case | {"profile.steps": [1], "job.dump_folder": str(tmp_path)}
    got = world.run(2, named, watched, timeout=200)[0]
    errors = parity.compare(got, parity.expected(case, 2), parity.read(case, 2))
    assert max(errors.values()) <= 1e-10, errors
    assert len(list((tmp_path / "profile").glob("*.json.gz"))) == 1


def test_what_cannot_be_recorded_is_refused() -> None:
    asked = {"profile.steps": [99], "profile.ranks": [0, 7], "profile.memory": "oom", "metrics.wandb": "titan"}
    config = parity.read({}, 1)
    for path, value in asked.items():
        table, name = path.split(".")
        config = replace(config, **{table: replace(getattr(config, table), **{name: value})})
    text = "\n".join([*(law.text for law in contradictions(config)), *refusals(config, 1)])
    for part in (
        "profile.steps has 99, and training.steps = 10",
        "profile.ranks has 7, and the ranks are 0 to 0",
        'profile.memory = "oom" records the memory of GPUs',
        'pip install "titanmoe[wandb]"',
    ):
        assert part in text


@pytest.mark.parametrize("asked", ["steps", "oom"])
def test_the_history_of_a_gpus_memory_is_kept_where_it_was_asked_for(asked: str, tmp_path: Path) -> None:
    from titanmoe.config.schema import Profile
    from titanmoe.train.runtime import Runtime
    from titanmoe.train.timing import SNAPSHOT_ALLOCATIONS, Profiler

    with FakeGPU() as gpu:
        profiler = Profiler(Profile(steps=[2], ranks=[0], memory=asked), tmp_path, Runtime(0, 0, 1, GPU), False)
        assert gpu.calls == [("record", SNAPSHOT_ALLOCATIONS)]
        for number in (1, 2):
            with profiler.step(number):
                torch.ones(3, device="cuda").sum()
        with pytest.raises(torch.OutOfMemoryError), profiler.step(3):
            raise torch.OutOfMemoryError
    names = [f"step-{number}-rank-0.pickle" for number in (2,) * (asked == "steps")]
    names.append("out-of-memory-step-3-rank-0.pickle")
    assert gpu.calls[1:] == [("snapshot", str(tmp_path / "profile" / name)) for name in names]
    assert (tmp_path / "profile/step-2-rank-0.txt").exists()
