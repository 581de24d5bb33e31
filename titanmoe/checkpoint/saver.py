"""Saving beside the training: stage, write, publish, retain."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.folder import Piece, save, together
from titanmoe.checkpoint.inside import CheckpointError
from titanmoe.checkpoint.manifest import Manifest, Sum
from titanmoe.config.schema import Checkpoint as Options

PATIENCE = timedelta(hours=2)
"""How long a rank waits for the slowest disk."""


class Saver:
    """One checkpoint at a time; all ranks call it together."""

    def __init__(self, folder: Path, options: Options, say: Callable[[str], None] = print):
        self.folder, self.options, self.say = folder, options, say
        self.passed: list[Path] = []
        """What could not be used when the run began. It keeps its name, for a start that can, until one is newer."""
        # A group of its own, on CPU tensors: the thread's messages must never meet those of a training step.
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if dist.get_world_size() > 1 else None
        self.first = dist.get_rank() == 0
        self.saved_step = -1
        self.failed: CheckpointError | None = None
        self._thread: threading.Thread | None = None
        self._staged: dict[str, Tensor] = {}
        together(self.group, lambda: self._prepare() if self.first else None)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._say(layout.sweep(self.folder))

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self.say(f"checkpoint: {line}")

    def save(self, step: int, pieces: Mapping[str, Piece], record: dict[str, Any]) -> float:
        """Returns the seconds for which training stood still."""
        began = time.monotonic()
        self.wait()
        if self.options.save == "sync":
            self._write(step, pieces, record)
        else:
            staged = {name: replace(piece, tensor=self._copy(name, piece.tensor)) for name, piece in pieces.items()}
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._thread = threading.Thread(target=self._attempt, args=(step, staged, record), name="checkpoint")
            self._thread.start()
        self.saved_step = step
        return time.monotonic() - began

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.failed:
            raise self.failed

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Into memory kept from one checkpoint to the next; page-locked for a GPU, whose copies then overlap."""
        kept = self._staged.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._staged[name] = kept
        return kept.copy_(tensor, non_blocking=True)

    def _attempt(self, step: int, pieces: Mapping[str, Piece], record: dict[str, Any]) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: training first, if cores are few
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self._write(step, pieces, record)
        except CheckpointError as error:
            self.failed = error
        except Exception as error:  # a lost connection, say: the thread's own traceback would end unseen
            self.failed = CheckpointError(f"{self.folder}: {type(error).__name__} {error}")

    def _write(self, step: int, pieces: Mapping[str, Piece], record: dict[str, Any]) -> None:
        target = self.folder / layout.name_of(step)
        save(
            target,
            pieces,
            lambda sums: self._manifest(step, sums, record),
            self.group,
            layout.files(self.folder / layout.CARRIED),
        )
        together(self.group, lambda: self._settle(target) if self.first else None)

    def _manifest(self, step: int, sums: dict[str, Sum], record: dict[str, Any]) -> Manifest:
        number = layout.next_number(self.folder)
        for path in self.passed:
            self._say([f"{path} was passed over: kept as {layout.set_aside(path).name}"])
        self.passed = []
        return Manifest(step, number, sums, record)

    def carry(self, find: Callable[[], Mapping[str, Path]]) -> None:
        """Config and tokenizer of the model that the run began from: every checkpoint holds a copy."""

        def copy() -> None:
            home = self.folder / layout.CARRIED
            if home.is_symlink():
                raise CheckpointError(f"{home} is a link, and files are copied into it: put a folder there")
            for name, file in find().items():
                home.mkdir(exist_ok=True)
                (home / name).unlink(missing_ok=True)  # a link would be written through
                shutil.copyfile(file, home / name)

        together(self.group, lambda: copy() if self.first else None)

    def _settle(self, target: Path) -> None:
        layout.point(self.folder, target.name)
        self._say(layout.retain(self.folder, target, self.options.keep_last, self.options.keep_every))
