"""What is saved is finite, fits on the disk and gets there in time; otherwise the run ends with one line."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.checkpoint import runs
from tests.support.full_disk import fail_writes
from titanmoe.checkpoint import layout, write_tensors
from titanmoe.checkpoint import saver as saver_module
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.layout import CheckpointError
from titanmoe.checkpoint.saver import Saver
from titanmoe.checkpoint.write_tensors import TensorShard, describe_first_nonfinite
from titanmoe.config.schema import Checkpoint
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Loader
from titanmoe.observe import Observer, listening

NAN = float("nan")


# ---- numbers


def test_the_first_tensor_that_is_not_finite_is_named_and_large_numbers_are_no_fault():
    sound = {"a": torch.full((3,), 1e30), "half": torch.full((3,), 6e4).half(), "n": torch.ones(2, dtype=torch.long)}
    assert describe_first_nonfinite(sound | {"empty": torch.empty(0)}) == "" == describe_first_nonfinite({})
    for bad in (NAN, float("inf"), -float("inf")):
        broken = {"b": torch.tensor([0.0, bad, bad]), "c": torch.tensor([bad])}
        assert describe_first_nonfinite(sound | broken) == "b (2 of 3 numbers are NaN or infinite)"


def train_with_a_nan(folder: str, save: str) -> tuple[str, int]:
    """In step 2 one rank's copy of a bias, which another rank would write, is NaN."""
    options = {"job.dump_folder": folder, "checkpoint.save": save, "checkpoint.keep_last": 1}

    class Poison(Observer):
        def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
            if step == 2 and dist.get_rank() == 1:
                trainer.training.buffers["layers.1.moe.router.expert_bias"][3] = NAN

    changes = runs.RUN | {"parallelism.experts.ep": 2, "training.steps": 9, "training.global_batch_size": 2} | options
    trainer = parity.make_trainer(changes)
    try:
        with listening(Poison()):
            trainer.train()
    except CheckpointError as error:
        return str(error), trainer.step
    return "", trainer.step


@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_nan_is_never_published_and_names_tensor_rank_and_step(tmp_path, save):
    ends = world.run(2, train_with_a_nan, str(tmp_path), save)
    assert ends[0] == ends[1] and ends[0][1] < 9
    message = "step-00000002 is not saved: on rank 1 model.layers.1.moe.router.expert_bias (1 of 8 numbers are NaN"
    assert message in ends[0][0]
    folder = tmp_path / "run/checkpoints"
    assert sorted(os.listdir(folder)) == ["latest", "step-00000001"]
    assert layout.find_damage(folder / "step-00000001") == []


def save_copies(folder: str, broken: list[int], numbers: int) -> tuple[str, int]:
    """Two tensors of which both ranks have equal copies, except for a NaN in each on the broken ranks."""
    message, looked_at = "", []
    look = write_tensors.describe_first_nonfinite
    write_tensors.describe_first_nonfinite = lambda tensors: (looked_at.extend(tensors), look(tensors))[1]
    saver = Saver(Path(folder), Checkpoint(enable=True, save="sync"))
    copies = {name: torch.zeros(numbers) for name in ("model.a", "model.b")}
    if dist.get_rank() in broken:
        for tensor in copies.values():
            tensor[-1] = NAN
    try:
        saver.save(2, {name: TensorShard(t, (0,), (numbers,)) for name, t in copies.items()}, {"step": 2})
    except CheckpointError as error:
        message = str(error)
    finally:
        write_tensors.describe_first_nonfinite = look
    return message, len(looked_at)


@pytest.mark.parametrize(("broken", "others"), [([0], ""), ([1], ""), ([0, 1], ", and on 1 more rank")])
def test_each_rank_checks_the_copies_that_it_writes(tmp_path, broken, others):
    size = write_tensors.SMALL_NUMEL + 1
    ends = world.run(2, save_copies, str(tmp_path), broken, size)
    assert ends[0] == ends[1] and ends[0][1] == 1, "each rank writes one of two tensors, and looks at that"
    assert f"is not saved: on rank {broken[0]} model." in ends[0][0] and f"infinite){others}. Earlier" in ends[0][0]
    assert layout.checkpoints_by_step(tmp_path) == {}


def test_small_copies_are_checked_everywhere(tmp_path):
    ends = world.run(2, save_copies, str(tmp_path), [1], 8)
    assert ends[0] == ends[1] and ends[0][1] == 2 and "on rank 1 model.a (1 of 8 numbers" in ends[0][0]


# ---- a full disk


def write_a_file_too_large(folder: str, tensors: int, numbers: int, name: str) -> str:
    """The real errors: the kernel's, and what torch turns them into."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    pieces = {f"model.{name}{n}": TensorShard(torch.zeros(numbers), (0,), (numbers,)) for n in range(tensors)}
    try:
        write_checkpoint(f"{folder}/step-00000002", pieces, {"step": 2})
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def test_a_disk_that_fills_is_one_line_with_the_file_and_what_is_missing(tmp_path):
    (message,) = world.run(1, write_a_file_too_large, str(tmp_path), 2, 1 << 14, "a")
    file = tmp_path / "step-00000002.writing/rank-00000-000.distcp"
    assert message.startswith(f"{file}: File too large: 65,536 more bytes are needed and ") and "\n" not in message
    assert message.endswith(" are free there") and "inline_container" not in message


def test_a_disk_that_fills_with_the_last_small_files_is_one_line_too(tmp_path):
    (message,) = world.run(1, write_a_file_too_large, str(tmp_path), 20, 1, "a" * 9999)
    file = tmp_path / "step-00000002.writing/tensors.json"
    assert message.startswith(f"{file}: File too large: ") and "more bytes are needed" in message
    assert "\n" not in message


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_that_torch_hides_is_reported(tmp_path, monkeypatch, code):
    write = write_tensors._ChecksummedFile.write

    def fail(self: Any, data: bytes) -> int:
        try:
            if self.bytes > 200:
                raise OSError(code, os.strerror(code))
            return write(self, data)
        except OSError as error:
            self.failure = error
            raise RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos") from None

    monkeypatch.setattr(write_tensors._ChecksummedFile, "write", fail)
    with pytest.raises(CheckpointError, match=f"rank-00000-000.distcp: {os.strerror(code)}") as error:
        write_checkpoint(tmp_path / "c", {"model.a": TensorShard(torch.zeros(999), (0,), (999,))}, {})
    assert ("more bytes are needed" in str(error.value)) == (code == errno.ENOSPC)


def test_a_small_file_on_a_full_disk_is_named_too(tmp_path, monkeypatch):
    file = tmp_path / "latest.new"
    fail_writes(monkeypatch, file)
    with pytest.raises(CheckpointError, match=f"{file}: No space left on device: 14 more bytes are needed and "):
        layout.write_text(file, "step-00000002\n")


# ---- a disk that does not answer


def train_while_a_disk_hangs(folder: str) -> tuple[str, int]:
    """Rank 1's disk accepts no byte of step 4. The clock stands still until that has begun, and then jumps."""
    options = {"job.dump_folder": folder, "checkpoint.interval": 2, "parallelism.experts.ep": 2}
    write, reached, go = write_tensors._ChecksummedFile.write, threading.Event(), threading.Event()

    class Patient(Loader):
        """Step 4's save must hang before step 5 asks whether to stop."""

        def next_step(self) -> list[Batch]:
            if dist.get_rank() == 1 and trainer.step == 5:
                reached.wait()
            return super().next_step()

    trainer = parity.make_trainer(runs.RUN | options | {"training.steps": 10_000}, loader=Patient)

    def hold(self: Any, data: bytes) -> int:
        if dist.get_rank() == 1 and "step-00000004" in str(self.path):
            reached.set()
            go.wait()
        return write(self, data)

    clock = SimpleNamespace(monotonic=lambda: 1e6 if reached.is_set() or trainer.stopping else 0.0)
    write_tensors._ChecksummedFile.write, saver_module.time = hold, clock
    try:
        trainer.train()
    except CheckpointError as error:
        return str(error), trainer.step
    finally:
        go.set()
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        write_tensors._ChecksummedFile.write, saver_module.time = write, time
    return "", trainer.step


def test_a_save_that_hangs_ends_the_run_on_all_ranks_with_the_rank_and_the_file(tmp_path):
    ends = world.run(2, train_while_a_disk_hangs, str(tmp_path))
    assert ends[0] == ends[1]
    message, step = ends[0]
    folder = tmp_path / "run/checkpoints"
    assert step == 5, "it does not wait for the next save"
    assert f"{folder}/step-00000004 is not saved after checkpoint.timeout_s = 1800 s: " in message
    assert f"rank 1 is still writing {folder}/step-00000004.writing/rank-00001-000.distcp" in message
    assert "waiting for the other ranks" not in message


PHASES = {
    "make_empty": "making ",
    "check_files": "reading back ",
    "publish": "publishing ",
    "remove_old": "removing old checkpoints",
}


def hang_in(folder: str, where: str) -> str:
    """One rank that waits for its own save."""
    saver = Saver(Path(folder), Checkpoint(enable=True, save="sync"))
    work, reached, go = getattr(layout, where), threading.Event(), threading.Event()
    setattr(layout, where, lambda *args: (reached.set(), go.wait(), work(*args))[2])
    begins = [0.0, 0.0]  # the save, and its time

    def now() -> float:
        if begins:
            return begins.pop()
        reached.wait()
        return 1e6

    saver_module.time = SimpleNamespace(monotonic=now)
    try:
        saver.save(2, {"model.w": TensorShard(torch.zeros(4), (0,), (4,))}, {"step": 2})
    except CheckpointError as error:
        return str(error)
    finally:
        go.set()
        saver._thread.join()
        setattr(layout, where, work)
        saver_module.time = time
    return ""


@pytest.mark.parametrize(("where", "message"), PHASES.items())
def test_whatever_a_rank_is_doing_has_a_name(tmp_path, where, message):
    (end,) = world.run(1, hang_in, str(tmp_path), where)
    assert "step-00000002 is not saved after checkpoint.timeout_s = 1800 s: rank 0 is still " in end and message in end


def test_a_thread_in_a_message_does_not_keep_the_process(monkeypatch):
    """stop() after a save that hangs: its group may never end."""
    from titanmoe.train import runtime

    never, hook = threading.Event(), sys.excepthook
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", never.wait)
    monkeypatch.setattr(runtime, "STOP_SECONDS", 0.01)
    runtime.stop(abandon=True)
    never.set()
    assert sys.excepthook is hook
