"""Saving in the background: what is staged, what happens when it fails."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.checkpoint import runs
from tests.support.fake_gpu import FakeGPU
from titanmoe.checkpoint import layout, write_tensors
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.on_all_ranks import from_rank, on_all_ranks, raise_on_all_ranks
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.checkpoint.saver import Saver
from titanmoe.checkpoint.write_tensors import TensorShard
from titanmoe.config.schema import Checkpoint as Options


def save_and_go_on(folder: str) -> list[bool]:
    """Weights change while the writer is held up; what is written must be their old values."""
    saver = Saver(Path(folder), Options(enable=True, save="async"))
    weight, go, write = torch.zeros(1000), threading.Event(), write_tensors._ChecksummedFile.write
    write_tensors._ChecksummedFile.write = lambda self, data: (go.wait(20), write(self, data))[1]
    try:
        for step in (1, 2):
            go.clear()
            weight.fill_(step)
            threading.Timer(0.05, go.set).start()
            saver.save(step, {"model.w": TensorShard(weight, (0,), (1000,))}, {"step": step})
            weight.fill_(-1)
        go.set()
        saver.wait()
    finally:
        write_tensors._ChecksummedFile.write = write
    return [
        bool((Checkpoint(p).read("model.w") == s).all()) for s, p in layout.checkpoints_by_step(Path(folder)).items()
    ]


def test_what_is_saved_is_what_it_was_at_that_step(tmp_path):
    assert world.run(1, save_and_go_on, str(tmp_path / "c"))[0] == [True, True]


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", "/proc/ck"):
        with pytest.raises(
            world.RankError, match=r"checkpoint.folder: cannot write to /.*: name another folder, or set"
        ):
            world.run(1, save_and_go_on, str(folder))


SMALL = {"model.num_layers": 1, "training.global_batch_size": 2}


def train_on_a_filling_disk(folder: str, save: str) -> tuple[str, int]:
    """From the second checkpoint on, rank 1 has no space left."""
    options = {"job.dump_folder": folder, "checkpoint.save": save, "checkpoint.interval": 2}
    trainer = parity.make_trainer(runs.RUN | SMALL | {"parallelism.experts.ep": 2} | options)
    write = write_tensors._ChecksummedFile.write

    def full(self: Any, data: bytes) -> int:
        if "step-00000002" not in str(self.path) and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    write_tensors._ChecksummedFile.write = full
    try:
        trainer.train()
        return "", trainer.step
    except CheckpointError as error:
        return str(error), trainer.step
    finally:
        write_tensors._ChecksummedFile.write = write


def test_a_save_that_fails_ends_the_run_on_all_ranks_with_the_file(tmp_path):
    for save in ("sync", "async"):
        ends = world.run(2, train_on_a_filling_disk, str(tmp_path / save), save)
        assert ends[0] == ends[1], "the same message, and stopped at the same step"
        assert "step-00000004.writing/rank-00001-000.distcp: No space left on device" in ends[0][0]
        assert ends[0][1] < 10, "it does not train on unsaved"
        folder = tmp_path / save / "run/checkpoints"
        assert (
            list(layout.checkpoints_by_step(folder)) == [2] and layout.find_damage(layout.newest_first(folder)[0]) == []
        )
        assert not list(folder.glob("*.writing")), "a full disk does not stay full"


def train(folder: str, more: dict[str, Any]) -> None:
    parity.make_trainer(runs.RUN | SMALL | {"job.dump_folder": folder, "training.steps": 4} | more).train()


def test_the_pause_of_training_is_a_metric(tmp_path):
    world.run(2, train, str(tmp_path), {"checkpoint.interval": 2, "parallelism.experts.ep": 2})
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert ["checkpoint_blocked_s" in line for line in lines] == [False, False, True, False]


def test_an_interval_of_0_saves_only_at_the_end(tmp_path):
    world.run(1, train, str(tmp_path), {"checkpoint.interval": 0})
    assert list(layout.checkpoints_by_step(tmp_path / "run/checkpoints")) == [4]


def _copies(folder: str) -> list[str]:
    """Of a GPU's state. Returns the lines that were said."""
    lines: list[str] = []
    saver = Saver(Path(folder), Options(enable=True), lines.append)
    shapes: list[Any] = [((5, 3), torch.float32), ((), torch.int64), ((0, 4), torch.bfloat16), ((7,), torch.bfloat16)]
    with FakeGPU() as gpu:
        state = [torch.full(shape, i + 2, dtype=dtype, device="cuda") for i, (shape, dtype) in enumerate(shapes)]
        blocks = []
        for factor in (1, 3):
            copies = saver._copy_to_staging([x * factor for x in state])
            torch.cuda.synchronize()
            for copy, x in zip(copies, state, strict=True):
                assert copy.dtype == x.dtype and torch.equal(copy, (x * factor).cpu()) and copy.data_ptr() % 64 == 0
            blocks.append(dict(gpu.registered))
            assert {copy.untyped_storage().data_ptr() for copy in copies} == set(gpu.registered)
        assert blocks[0] == blocks[1] and [*blocks[0].values()] == [64 * 3]  # once, and nothing for what is empty
        del copies, copy
        saver._copy_to_staging([*state, torch.zeros(100, device="cuda")])
        assert [*gpu.registered.values()] == [64 * 3 + 448], "what was there before is not locked any longer"
        staged = [copy for copy in gpu.copies if copy.place.startswith("checkpoint/saver.py")]
        assert staged and all(copy.page_locked and not copy.waits for copy in staged)
        assert gpu.races == []
        refused = SimpleNamespace(cudaHostRegister=lambda *arguments: 1)
        with mock.patch.object(torch.cuda, "cudart", lambda: refused):
            saver._copy_to_staging([torch.zeros(10_000, device="cuda")])
    assert saver._copy_to_staging([]) == []
    return lines


def test_a_state_is_copied_into_one_block_of_page_locked_memory(tmp_path: Path) -> None:
    (lines,) = world.run(1, _copies, str(tmp_path / "c"))
    assert len(lines) == 1 and "refuses to page-lock" in lines[0]


def results_of_a_group() -> list[Any]:
    """Ranks 1 and 2 are ranks 0 and 1 of a group."""
    group, rank = dist.new_group([1, 2]), dist.get_rank()

    def refuses() -> None:
        raise CheckpointError(f"rank {rank} refuses")

    if rank == 0:
        return []
    said = from_rank(group, 0, lambda: rank), from_rank(group, 1, lambda: rank)
    with pytest.raises(CheckpointError, match="rank 2 refuses"):
        from_rank(group, 1, refuses)
    return [*said, *on_all_ranks(group, lambda: rank)]


def test_a_rank_of_a_group_answers_for_all_of_it() -> None:
    assert world.run(3, results_of_a_group) == [[], [1, 2, 1, 2], [1, 2, 1, 2]]


def errors_after_one_rank_fails() -> list[str]:
    """Return the error of this rank under each of the three functions, after the work of rank 1 raised a KeyError."""

    def work() -> int:
        return {}["weights"] if dist.get_rank() == 1 else 0

    raised = []
    calls = lambda: on_all_ranks(dist.group.WORLD, work), lambda: from_rank(dist.group.WORLD, 1, work)
    for call in (*calls, lambda: raise_on_all_ranks(dist.group.WORLD, work)):
        with pytest.raises(Exception) as failure:
            call()
        raised.append(f"{failure.type.__name__}: {failure.value}")
    return raised


def test_an_unexpected_error_on_a_rank_ends_the_work_of_all() -> None:
    there, own = "RuntimeError: rank 1 raised KeyError: 'weights'", "KeyError: 'weights'"
    assert world.run(2, errors_after_one_rank_fails) == [[there] * 3, [own] * 3]
