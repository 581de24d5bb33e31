"""Runs on a GPU that is not there: the branches that only a GPU takes, with the numbers of a CPU and without races."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import parity, world
from tests.support.fake_gpu import GPU, Event, FakeGPU, Stream
from titanmoe.checkpoint.saver import Saver
from titanmoe.parallel.pairs import Pairs
from titanmoe.rehearse.rehearsal import fake_world
from titanmoe.train.optimizers import offload
from titanmoe.watch.step_times import CudaEventTimer

# ---- what is a race


def side(ready: bool, done: bool) -> list[str]:
    """A stream reads what the current one wrote, and that writes again. ready, done: the event that ends either."""
    with FakeGPU() as gpu:
        x, stream = torch.ones(3, device="cuda"), torch.cuda.Stream()
        if ready:
            stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(stream):
            y = x + 1
        if done:
            torch.cuda.current_stream().wait_stream(stream)
        x.add_(y)
        return gpu.races


def test_an_event_left_out_is_a_race_and_both_lines_are_named() -> None:
    assert side(True, True) == []
    (race,) = side(False, True)
    assert race.startswith("test_fake_gpu.py:") and " writes what test_fake_gpu.py:" in race
    assert sorted(race.split()[1] for race in side(True, False)) == ["reads", "writes"]


@pytest.mark.parametrize("how", ["", "record_stream", "event", "host"])
def test_memory_is_not_given_away_while_another_stream_uses_it(how: str) -> None:
    with FakeGPU() as gpu:
        x, stream = torch.ones(3, device="cuda"), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = x + 1
        if how == "record_stream":
            x.record_stream(stream)
        del x
        if how == "event":
            torch.cuda.current_stream().wait_stream(stream)
        if how == "host":
            torch.cuda.synchronize()
        torch.ones(3, device="cuda")
        assert len(gpu.races) == (not how) and all("may be given to test_fake_gpu.py" in race for race in gpu.races)
        del y


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_reads_what_has_arrived(waits: bool) -> None:
    with FakeGPU() as gpu:
        numbers = torch.arange(3, device="cuda").to("cpu", non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        assert numbers.tolist() == [0, 1, 2] and numbers.device.type == "cpu"
        assert len(gpu.races) == (not waits)
        assert torch.arange(3, device="cuda").tolist() == [0, 1, 2] and len(gpu.races) == (not waits)


# ---- steps

SMALL = {
    "parallelism.attention_backend": "plain",
    "moe.kernels": "torch",
    "model.num_layers": 1,
    "training.global_batch_size": 2,
    "data.source": "synthetic",
    "job.name": "run",
    "metrics.console": "lines",
}
RUN = SMALL | {
    "parallelism.experts.ep": 2,
    "optimizer.offload": True,
    "training.steps": 3,
    "training.timeout_s": 60,
    "checkpoint.enable": True,
    "checkpoint.interval": 1,
    "checkpoint.save": "async",
}
PAIRS = SMALL | {
    "parallelism.pp": 2,
    "parallelism.experts.ep": 2,
    "pipeline.schedule": "DualPipeV",
    "moe.overlap": "pairs",
    "model.num_layers": 4,
    "training.steps": 2,
    "training.global_batch_size": 8,
    "training.local_batch_size": 1,
}

COPIES = {
    ("parallel/batch_slice.py", "device", "", ""),
    ("parallel/batch_slice.py", "device", "waits", "pageable"),  # at the start: do ranks have the same samples?
    ("moe/dispatchers/alltoall.py", "host", "", ""),
    ("train/optimizers/offload.py", "device", "", ""),  # on streams of their own, unlike the others
    ("train/optimizers/offload.py", "host", "", ""),
    ("checkpoint/saver.py", "host", "", ""),
}
"""Between the GPU and the host: who copies, where to, whether the host waits, whether memory is pageable."""

PLANTS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    # The optimizer's step does not wait for its moments.
    "offload": lambda: mock.patch.object(offload.CudaCopies, "wait_on_device", lambda self, event: None),
    # Nor do their copies to the host wait for the step.
    "offload's way back": lambda: mock.patch.object(offload.CudaCopies, "mark", lambda self: None),
    # Counts are read before they have arrived, and a checkpoint's copies too.
    "counts": lambda: mock.patch.object(Event, "synchronize", lambda self: None),
    "saver": lambda: mock.patch.object(torch.cuda, "synchronize", lambda: None),
    # FSDP's streams wait for no other.
    "FSDP": lambda: mock.patch.object(Stream, "wait_stream", lambda self, other: None),
    "FSDP's events": lambda: mock.patch.object(Stream, "wait_event", lambda self, event: None),
}


def run(changes: dict[str, Any], on_gpu: bool, plant: str = "") -> tuple[list[float], dict[str, Any]]:
    """On a rank: losses of a few steps, and what a GPU would have been asked for."""
    from titanmoe.rank import watch
    from titanmoe.watch.number_checks import checks

    runtime, losses = parity.runtime_here(), []
    runtime = dataclasses.replace(runtime, device=GPU) if on_gpu else runtime
    config = parity.read(changes, runtime.world)
    write, here = Saver._write_in_thread, Pairs._for_other_thread

    def writing(saver: Saver, step: int, pieces: Any, *rest: Any) -> None:
        for piece in pieces.values():
            gpu.host_reads(piece.tensor)
        write(saver, step, pieces, *rest)

    with ExitStack() as stack:
        put = stack.enter_context
        put(mock.patch.object(offload, "BUCKET_BYTES", 1 << 12))
        put(mock.patch.object(CudaEventTimer, "every", 1))
        gpu: Any = put(FakeGPU(runtime.world)) if on_gpu else None
        if on_gpu:
            put(mock.patch.object(Saver, "_write_in_thread", writing))
            put(mock.patch.object(Pairs, "_for_other_thread", lambda pairs, work: here(pairs, gpu.asking(work))))
        trainer = parity.build_trainer(config, runtime, garbage=parity.no_collection, checks=checks)
        put(PLANTS[plant]())
        step = trainer.train_step
        trainer.train_step = lambda: losses.append((values := step())["loss"]) or values
        with watch(config, trainer.training):
            trainer.train()
        if gpu is None:
            return losses, {}
        copies = {
            (copy.place.partition(":")[0], copy.to, "waits" * copy.waits, "pageable" * (not copy.page_locked))
            for copy in gpu.copies
            if (copy.stream is gpu.default) != ("offload" in copy.place)
        }
        return losses, {
            "races": gpu.races,
            "copies": copies,
            "timed on": {event.stream is gpu.default for event in gpu.events if event.timed},
            "streams": sum(isinstance(actor, Stream) for actor in gpu.order.clocks),
        }


def test_a_run_on_a_gpu_has_the_numbers_of_one_on_a_cpu_and_no_races(tmp_path: Path) -> None:
    on, off = (world.run(2, run, RUN | {"job.dump_folder": str(tmp_path / str(gpu))}, gpu) for gpu in (True, False))
    for (losses, seen), (expected, _) in zip(on, off, strict=True):
        assert losses == expected and len(losses) == 3
        assert seen["races"] == []
        assert seen["timed on"] == {True}, "where computation waits"
        # Offload's two, and three of FSDP's besides the one that computes.
        assert seen["streams"] >= 5
        assert seen["copies"] == COPIES


@pytest.mark.slow
def test_the_halves_of_a_pair_race_with_nobody(tmp_path: Path) -> None:
    on, off = (world.run(4, run, PAIRS | {"job.dump_folder": str(tmp_path / str(gpu))}, gpu) for gpu in (True, False))
    for (losses, seen), (expected, _) in zip(on, off, strict=True):
        assert losses == expected
        assert seen["races"] == []


@pytest.mark.parametrize(
    ("plant", "places"),
    [
        ("offload", ("train/optimizers/offload.py", "train/optimizers/adamw.py")),
        ("offload's way back", ("train/optimizers/adamw.py", "train/optimizers/offload.py")),
        ("counts", ("moe/dispatchers/alltoall.py", "moe/dispatchers/alltoall.py")),
        ("saver", ("checkpoint/saver.py", "test_fake_gpu.py")),
    ],
)
def test_a_wait_left_out_is_found(plant: str, places: tuple[str, str], tmp_path: Path) -> None:
    changes = RUN | {"parallelism.experts.ep": 1, "training.steps": 2, "job.dump_folder": str(tmp_path)}
    if plant == "counts":  # which a rank with all experts reads for biases alone
        changes |= {"model.expert_linear_bias": True}
    ((_, seen),) = world.run(1, run, changes, True, plant)
    assert between(seen["races"], *places), seen["races"]


def between(races: list[str], first: str, then: str) -> bool:
    return any(race.startswith(first) and then in race.partition(" what ")[2] for race in races)


# ---- steps of more ranks than there are: messages bring nothing, so these are about order alone

PADDED = SMALL | {
    "model.num_layers": 2,
    "training.global_batch_size": 8,
    "moe.capacity_factor": 1.0,
    "moe.pad_to_capacity": True,
    "parallelism.experts.ep": 2,
    "optimizer.offload": True,
}


def races(changes: dict[str, Any], plant: str = "") -> list[str]:
    """Of two steps of rank 0 of 4."""
    config = parity.read(PADDED | changes, 4)
    with ExitStack() as stack:
        put = stack.enter_context
        put(fake_world(0, 4))
        put(mock.patch.object(offload, "BUCKET_BYTES", 1 << 12))
        put(mock.patch("titanmoe.train.trainer.check_alike"))
        put(mock.patch("titanmoe.train.guard.Guard.check_finite"))  # what never arrives may be NaN
        gpu = put(FakeGPU())
        runtime = dataclasses.replace(parity.runtime_here(), device=GPU)
        trainer = parity.build_trainer(config, runtime, garbage=parity.no_collection, loader=parity.samples())
        put(PLANTS[plant]())
        for _ in range(2):
            trainer.train_step()
        return gpu.races


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallelism.dp_replicate": 2},
        {"parallelism.tp": 2},
        {"activation_checkpoint.mode": "full"},
        {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"},
        {"optimizer.name": "muon", "parallelism.tp": 2, "parallelism.experts.etp": 2, "optimizer.qk_clip": 100.0},
    ],
    ids=["FSDP", "HSDP", "tp", "recomputed", "narrow", "muon"],
)
def test_a_step_is_in_order(changes: dict[str, Any]) -> None:
    assert races(changes) == []


def test_fsdp_without_its_waits_is_found() -> None:
    gather, reduce = "(gather weights)", "(reduce gradients)"
    found = races({}, "FSDP")
    assert between(found, "models/transformer.py", gather) and between(found, "moe/layer.py", reduce), found
    found = races({}, "FSDP's events")
    assert between(found, "train/optimizers/adamw.py", gather), found
    assert any("is freed at" in race and reduce in race for race in found), found
