"""Disks that do not answer, kills between two renames, links: nothing is lost, and nothing starts from scratch by
itself."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import world
from tests.checkpoint.folders import make
from tests.checkpoint.test_layout import config
from titanmoe.checkpoint import choose_checkpoint, layout, safe_files
from titanmoe.checkpoint.checkpoint_folder import Checkpoint, save
from titanmoe.checkpoint.choose_checkpoint import choose_start
from titanmoe.checkpoint.manifest import Manifest
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.safe_files import CheckpointError, Unreadable
from titanmoe.checkpoint.saver import Saver
from titanmoe.checkpoint.write_tensors import LazyTensor, TensorShard
from titanmoe.config import ConfigError
from titanmoe.config.schema import Checkpoint as Options


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, step in enumerate((10, 20, 30), 1):
        make(tmp_path / "run/checkpoints", step, number)
    return tmp_path / "run/checkpoints"


def start_of(folder: Path) -> choose_checkpoint.StartPoint:
    run = folder.parent
    return choose_start(config(run).checkpoint, run, layout.find_damage)


# ---- disks that do not answer


class Faults:
    """Everything below a path answers with an error, a given number of times for each operation on each file."""

    def __init__(self, patch: pytest.MonkeyPatch, path: Path, times: float, number: int = errno.ESTALE):
        self.path, self.times, self.number, self.calls = str(path), times, number, Counter[Any]()
        for name in ("open", "listdir", "lstat"):
            patch.setattr(os, name, self._faulty(name, getattr(os, name)))

    def _faulty(self, name: str, real: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            where = str(path)
            if (descriptor := kwargs.get("dir_fd")) is not None:
                where = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), where)
            if isinstance(path, str | Path) and where.startswith(self.path):
                self.calls[name, where] += 1
                if self.calls[name, where] <= self.times:
                    raise OSError(self.number, os.strerror(self.number), str(path))
            return real(path, *args, **kwargs)

        return call


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_transient_errors_are_retried(folder, monkeypatch, waits, number):
    faults = Faults(monkeypatch, folder, times=4, number=number)
    start = start_of(folder)
    assert (start.path, start.notes) == (folder / "step-00000030", [])
    assert {name for name, _ in faults.calls} == {"open", "listdir", "lstat"} and set(waits) == set(
        safe_files.RETRY_DELAYS_S
    )


def test_retrying_has_an_end(folder, monkeypatch, waits):
    Faults(monkeypatch, folder / "latest", times=1e9)
    with pytest.raises(Unreadable, match="latest: Stale file handle"):
        safe_files.read(folder, "latest", 100)
    assert waits == list(safe_files.RETRY_DELAYS_S)
    waits.clear()
    Faults(monkeypatch, folder / "latest", times=1e9, number=errno.EACCES)
    with pytest.raises(Unreadable, match="latest: Permission denied"):
        safe_files.read(folder, "latest", 100)
    assert waits == [], "what does not pass is not waited for"


def test_a_folder_that_stays_unreadable_is_passed_over_and_reported(folder, monkeypatch, waits):
    Faults(monkeypatch, folder / "step-00000030", times=1e9)
    start = start_of(folder)
    assert start.path == folder / "step-00000020" and start.passed_over == [folder / "step-00000030"]
    assert "passing over step-00000030" in start.notes[0] and "Stale file handle" in start.notes[0]


@pytest.mark.parametrize("what", ["", "step-"])
def test_unreadable_checkpoints_never_mean_a_new_run(folder, monkeypatch, waits, what):
    """Neither if their folder gives no answer, nor if each of them gives none."""
    Faults(monkeypatch, folder / what if what else folder, times=1e9)
    with pytest.raises(CheckpointError) as refused:
        start_of(folder)
    named = [f"step-000000{step}" for step in (10, 20, 30)] if what else [str(folder)]
    assert all(f"{name}" in str(refused.value) for name in named) and "Stale file handle" in str(refused.value)
    assert "--checkpoint.load=none" in str(refused.value)
    if not what:
        with pytest.raises(Unreadable):
            layout.checkpoints_by_step(folder)


def test_a_rank_that_gets_no_answer_derives_no_batch_or_mapping_of_its_own(folder, monkeypatch, waits):
    Faults(monkeypatch, folder, times=1e9)
    for ask in (choose_checkpoint.record_to_resume, choose_checkpoint.has_begun):
        with pytest.raises(ConfigError, match="Stale file handle"):
            ask(config(folder.parent))


# ---- kills between two renames


class Killed(BaseException):
    pass


def kill_before_rename(patch: pytest.MonkeyPatch, at: int) -> None:
    calls = Counter[str]()

    def dying(real: Any) -> Any:
        def rename(*args: Any) -> None:
            calls["all"] += 1
            if calls["all"] == at:
                raise Killed
            real(*args)

        return rename

    patch.setattr(os, "rename", dying(os.rename))
    patch.setattr(os, "replace", dying(os.replace))


@pytest.mark.parametrize(
    ("step", "at", "whole"),
    # manifest, name, latest; and if the name is taken: manifest, removing the old name, name, latest
    [(40, 1, False), (40, 2, True), (40, 3, True), (30, 1, False), (30, 2, True), (30, 3, True), (30, 4, True)],
)
def test_the_newest_whole_one_wins_whatever_rename_was_the_last(folder, step, at, whole):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_before_rename(patch, at)
        again = {"model.a": LazyTensor((64,), torch.float32, slice_of_full(lambda: torch.full((64,), -1.0)))}
        save(
            folder / layout.folder_name(step), again, lambda sums: Manifest(step, layout.next_save_number(folder), sums)
        )
        layout.write_latest(folder, layout.folder_name(step))
    ahead = choose_start(config(folder.parent).checkpoint, folder.parent, layout.find_damage).path
    message = layout.clean_up_interrupted(folder)
    best = start_of(folder).path
    assert best == folder / layout.folder_name(step if whole else 30) and layout.find_damage(best) == []
    assert bool((Checkpoint(best).read("model.a") == -1).all()) == whole
    assert ahead == best or ahead == best.with_name(best.name + layout.WRITING), "read ahead as it will be loaded"
    assert not any(path.suffix for path in folder.iterdir())
    assert len(message) == (whole and at < (3 if step == 40 else 4))
    if message:
        assert "complete but for its name" in message[0]


def test_a_complete_but_damaged_checkpoint_is_kept_and_reported(folder):
    os.rename(folder / "step-00000030", folder / "step-00000030.writing")
    os.truncate(folder / "step-00000030.writing/rank-00000-000.distcp", 5)
    (message,) = layout.clean_up_interrupted(folder)
    assert "is damaged" in message and "has 5 bytes" in message and "kept as step-00000030.passed-over" in message
    assert (folder / "step-00000030.passed-over").is_dir() and start_of(folder).path == folder / "step-00000020"


# ---- retention


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_retention_leaves_what_it_cannot_read_and_what_is_newer(folder):
    (folder / "step-00000010" / layout.MANIFEST).write_text("{")
    assert layout.remove_old(folder, folder / "step-00000020", 1, 0) == []
    assert list(layout.checkpoints_by_step(folder)) == [10, 20, 30]
    assert layout.remove_old(folder, folder / "step-00000010", 1, 0) == [], "the newest itself says nothing"
    assert layout.remove_old(folder, folder / "step-00000030", 1, 0) == []
    assert list(layout.checkpoints_by_step(folder)) == [10, 30]


def test_a_link_is_removed_and_its_target_is_not(folder, tmp_path):
    archived = tmp_path / "archive"
    os.rename(folder / "step-00000010", archived)
    (folder / "step-00000010").symlink_to(archived)
    (message,) = layout.remove_old(folder, folder / "step-00000030", 2, 0)
    assert message == f"{folder / 'step-00000010'} was a link: it has been removed, and {archived} has not"
    assert names(folder) == ["latest", "step-00000020", "step-00000030"] and layout.find_damage(archived) == []
    for left in ("step-00000010.removing", "step-00000050.writing"):  # as an earlier titanmoe left it
        (folder / left).symlink_to(archived)
    assert len(layout.clean_up_interrupted(folder)) == 2
    assert names(folder) == ["latest", "step-00000020", "step-00000030"] and layout.find_damage(archived) == []


def test_what_cannot_be_removed_is_reported_and_ends_nothing(folder, monkeypatch):
    def busy(path: Any, *_: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(layout.shutil, "rmtree", busy)
    (message,) = layout.remove_old(folder, folder / "step-00000030", 2, 0)
    assert "cannot remove" in message and "step-00000010.removing: Device or resource busy" in message
    assert len(layout.clean_up_interrupted(folder)) == 1 and start_of(folder).path == folder / "step-00000030"


def go_on_past(folder: str, passed: list[str]) -> list[str]:
    lines: list[str] = []
    saver = Saver(Path(folder), Options(enable=True, save="sync", keep_last=1), lines.append)
    saver.passed_over = [Path(folder, name) for name in passed]
    for step in (30, 40):
        saver.save(step, {"model.a": TensorShard(torch.zeros(64), (0,), (64,))}, {"step": step})
    try:
        Path(folder, "hf").symlink_to(Path(folder).parent)
        saver.carry(lambda: {"config.json": Path(folder, "latest")})
    except CheckpointError as error:
        lines.append(str(error))
    return lines


def test_what_was_passed_over_is_never_removed(folder):
    """Neither by retention nor when the same step is repeated."""
    (message,) = world.run(1, go_on_past, str(folder), ["step-00000030", "step-00000010"])
    assert names(folder) == ["hf", "latest", "step-00000010.passed-over", "step-00000030.passed-over", "step-00000040"]
    assert bool((Checkpoint(folder / "step-00000030.passed-over").read("model.a") == 30).all())
    assert [line.split(" was passed over: kept as ")[-1] for line in message[:2]] == [
        "step-00000030.passed-over", "step-00000010.passed-over",
    ]  # fmt: skip
    assert len(message) == 3 and "hf is a link" in message[2] and not (folder.parent / "config.json").exists()
