"""Saving in the background: what is staged, what happens when it fails."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import parity, world
from tests.checkpoint import runs
from titanmoe.checkpoint import folder as folder_module
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.folder import Piece, open_checkpoint
from titanmoe.checkpoint.inside import CheckpointError
from titanmoe.checkpoint.saver import Saver
from titanmoe.config.schema import Checkpoint


def save_and_go_on(folder: str) -> list[bool]:
    """Weights change while the writer is held up; what is written must be their old values."""
    saver = Saver(Path(folder), Checkpoint(enable=True, save="async"))
    weight, go, write = torch.zeros(1000), threading.Event(), folder_module._Summing.write
    folder_module._Summing.write = lambda self, data: (go.wait(20), write(self, data))[1]
    try:
        for step in (1, 2):
            go.clear()
            weight.fill_(step)
            threading.Timer(0.05, go.set).start()
            saver.save(step, {"model.w": Piece(weight, (0,), (1000,))}, {"step": step})
            weight.fill_(-1)
        go.set()
        saver.wait()
    finally:
        folder_module._Summing.write = write
    return [bool((open_checkpoint(p).read("model.w") == s).all()) for s, p in layout.steps(Path(folder)).items()]


def test_what_is_saved_is_what_it_was_at_that_step(tmp_path):
    assert world.run(1, save_and_go_on, str(tmp_path / "c"))[0] == [True, True]


def train_on_a_filling_disk(folder: str, save: str) -> tuple[str, int]:
    """From the second checkpoint on, rank 1 has no space left."""
    options = {"job.dump_folder": folder, "checkpoint.save": save, "checkpoint.interval": 2}
    trainer = parity.make_trainer(runs.RUN | {"parallelism.experts.ep": 2} | options)
    write = folder_module._Summing.write

    def full(self: Any, data: bytes) -> int:
        if "step-00000002" not in str(self.path) and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    folder_module._Summing.write = full
    try:
        trainer.train()
        return "", trainer.step
    except CheckpointError as error:
        return str(error), trainer.step
    finally:
        folder_module._Summing.write = write


def test_a_save_that_fails_ends_the_run_on_all_ranks_with_the_file(tmp_path):
    for save in ("sync", "async"):
        ends = world.run(2, train_on_a_filling_disk, str(tmp_path / save), save)
        assert ends[0] == ends[1], "the same message, and stopped at the same step"
        assert "step-00000004.writing/rank-00001-000.distcp: No space left on device" in ends[0][0]
        assert ends[0][1] < 10, "it does not train on unsaved"
        folder = tmp_path / save / "run/checkpoints"
        assert list(layout.steps(folder)) == [2] and layout.damage(layout.candidates(folder)[0]) == []


def train(folder: str, more: dict[str, Any]) -> None:
    parity.make_trainer(runs.RUN | {"job.dump_folder": folder, "training.steps": 4} | more).train()


def test_the_pause_of_training_is_a_metric(tmp_path):
    world.run(2, train, str(tmp_path), {"checkpoint.interval": 2, "parallelism.experts.ep": 2})
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert ["checkpoint_blocked_s" in line for line in lines] == [False, False, True, False]


def test_an_interval_of_0_saves_only_at_the_end(tmp_path):
    world.run(1, train, str(tmp_path), {"checkpoint.interval": 0})
    assert list(layout.steps(tmp_path / "run/checkpoints")) == [4]
