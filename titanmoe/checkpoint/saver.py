"""Save checkpoints in a background thread while training goes on.

    training waits    `Saver.save` waits for the save before, copies this rank's shards to CPU memory, starts the thread
    in the thread     `titanmoe.checkpoint.checkpoint_folder.save`: all ranks write into step-N.writing, check it by
                      reading it back, and the first renames it to step-N: from then on it counts, whatever the file
                      `latest` says; then `_finish_save` removes old checkpoints
    after each step   the trainer polls `failed_or_late`; `wait` raises what went wrong

A save that fails or does not end within checkpoint.timeout_s raises a CheckpointError on all ranks, with what each slow
rank was doing. The threads have a process group of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import save
from titanmoe.checkpoint.manifest import Checksum, Manifest
from titanmoe.checkpoint.on_all_ranks import on_all_ranks
from titanmoe.checkpoint.safe_files import CheckpointError, SaveProgress
from titanmoe.checkpoint.write_tensors import TensorShard
from titanmoe.config.schema import Checkpoint as Options
from titanmoe.files import DISK_FULL_ERRNOS, write_error

RANKS_SHOWN = 8
"""Largest number of ranks that a message names."""
ALIGNED = 64
"""Alignment, in bytes, of the tensors' copies in the staging buffer; it suits every dtype."""


def page_lock(memory: Tensor) -> bool:
    """Page-lock a CPU tensor until it is freed; return whether the CUDA driver did so.

    pin_memory=True would round the allocation up to a power of two.
    """
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) != 0:
        return False
    weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return True


class Saver:
    """Writer of a run's checkpoints, one at a time. Its methods are collective over all ranks."""

    def __init__(self, folder: Path, options: Options, say: Callable[[str], None] = print):
        """Make the saves' process group and, on rank 0, the folder, in which interrupted saves are cleaned up.

        Collective over the world.

        Raises:
            CheckpointError: on all ranks, if rank 0 cannot write to the folder.
        """
        self.folder, self.options, self.say = folder, options, say
        self.passed_over: list[Path] = []
        """Checkpoints that could not be used when the run started. They keep their names until the next save."""
        # A group of its own, on CPU tensors: the thread's messages must never get mixed up with those of a training
        # step.
        several, patience = dist.get_world_size() > 1, timedelta(seconds=options.timeout_s)
        self.group = dist.new_group(backend="gloo", timeout=patience) if several else None
        self.world = dist.group.WORLD if several else None
        """The group for wait(): the writing thread may be stuck in a collective of self.group."""
        self.first = dist.get_rank() == 0
        self.begun_step = -1
        """Number of the step whose save began last, complete or not; -1 for none."""
        self._target = folder
        self._thread: threading.Thread | None = None
        self._progress, self._deadline, self._failure = SaveProgress(), 0.0, ""
        self._staged = torch.empty(0, dtype=torch.uint8)
        on_all_ranks(self.group, lambda: self._prepare() if self.first else None)

    def _prepare(self) -> None:
        """Make the folder, test that it can be written to, and complete or remove what interrupted saves left in it.

        Only the first rank calls it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.folder: cannot write to {self.folder.absolute()}: {error.strerror}: name another folder, "
                "or set checkpoint.enable = false to save nothing"
            ) from None
        self._say(layout.clean_up_interrupted(self.folder))

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self.say(f"checkpoint: {line}")

    def save(self, step: int, shards: Mapping[str, TensorShard], record: dict[str, Any]) -> float:
        """Begin to write a checkpoint, after the previous one is complete; return the seconds that training waited.

        With checkpoint.save = "async" the tensors are copied to CPU memory and written in a thread; with "sync" it
        returns once the checkpoint is complete. Collective over all ranks.

        Args:
            step: the training step, which names the checkpoint.
            shards: this rank's shards of the run's state, by the tensor's name in the checkpoint.
            record: the manifest's record of the run: config, mapping, tokens and the like; under checkpoint.keep_best
                also "best", a dict with the best "step" so far.

        Raises:
            CheckpointError: the previous save failed, or with "sync" this one did.
        """
        start = time.monotonic()
        self.wait()
        if self.options.save == "async":
            copies = self._copy_to_staging([shard.tensor for shard in shards.values()])
            shards = {name: replace(shard, tensor=x) for (name, shard), x in zip(shards.items(), copies, strict=True)}
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        if gpu is not None:
            torch.cuda.synchronize()
        self._target = self.folder / layout.folder_name(step)
        self._deadline = time.monotonic() + self.options.timeout_s
        # Also when training waits for it: a thread that is stuck in a disk operation cannot check the clock.
        self._thread = threading.Thread(
            target=self._write_in_thread, args=(step, shards, record, gpu), name="checkpoint", daemon=True
        )
        self._thread.start()
        if self.options.save == "sync":
            self.wait()
        self.begun_step = step
        return time.monotonic() - start

    @property
    def failed_or_late(self) -> bool:
        """Whether on this rank the current save has failed or exceeded checkpoint.timeout_s. Not collective."""
        late = self._thread is not None and self._thread.is_alive() and time.monotonic() > self._deadline
        return bool(self._failure) or late

    def wait(self) -> None:
        """Wait until the save that `save` began, if any, is complete. Collective over all ranks.

        Raises:
            CheckpointError: on all ranks, if the save failed on one or exceeded checkpoint.timeout_s.
        """
        if self._thread is None:
            return
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        activity = self._progress.what if self._thread.is_alive() else ""
        states = on_all_ranks(self.world, lambda: (activity, self._failure))
        if stuck := {rank: activity for rank, (activity, _) in enumerate(states) if activity}:
            raise CheckpointError(self._late_message(stuck))
        self._thread = None
        if reasons := dict.fromkeys(reason for _, reason in states if reason):
            raise CheckpointError("; ".join(reasons))

    def _late_message(self, stuck: dict[int, str]) -> str:
        """Return the message of a late save with up to 8 ranks; ranks that only wait are left out unless all do."""
        busy = {rank: activity for rank, activity in stuck.items() if activity != SaveProgress.WAITING} or stuck
        shown = ", ".join(f"rank {rank} is still {activity}" for rank, activity in list(busy.items())[:RANKS_SHOWN])
        more = f" (and {len(busy) - RANKS_SHOWN} more ranks)" if len(busy) > RANKS_SHOWN else ""
        return (
            f"{self._target} is not saved after checkpoint.timeout_s = "
            f"{self.options.timeout_s} s: {shown}{more}. Check that disk, or raise checkpoint.timeout_s"
        )

    def _copy_to_staging(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors into one CPU buffer and return the copies, in the same order.

        Later saves reuse the buffer. It is page-locked if the tensors are on a GPU: then the copies are asynchronous,
        and not complete until the device is synchronised.
        """
        ends = list(accumulate(-(-x.nbytes // ALIGNED) * ALIGNED for x in tensors))
        if not ends:
            return []
        if len(self._staged) < ends[-1]:
            self._staged = torch.empty(ends[-1], dtype=torch.uint8)
            if tensors[0].is_cuda and not page_lock(self._staged):
                self._say(["the driver refuses to page-lock memory for a copy of the state: saving pauses longer"])
        copies = []
        for x, begin in zip(tensors, [0, *ends], strict=False):
            copy = self._staged[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
            copies.append(copy.copy_(x, non_blocking=True))
        return copies

    def _write_in_thread(
        self, step: int, shards: Mapping[str, TensorShard], record: dict[str, Any], gpu: int | None
    ) -> None:
        """Write the checkpoint and `latest`, and remove old ones. An error goes into `_failure` and is not raised.

        Collective over all ranks, in the writing threads' group.
        """
        if gpu is not None:
            torch.cuda.set_device(gpu)
        # Where threads have their own priority: training first, if cores are few.
        if sys.platform == "linux" and self.options.save == "async":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        finishing = f"writing {self.folder / layout.LATEST} or removing old checkpoints"
        try:
            save(
                self._target,
                shards,
                lambda sums: self._manifest(step, sums, record),
                group=self.group,
                carried=layout.files_in(self.folder / layout.CARRIED),
                progress=self._progress,
                finite=True,
            )
            on_all_ranks(
                self.group, lambda: self._progress(finishing, self._finish_save, record) if self.first else None
            )
        except CheckpointError as error:
            self._failure = str(error)
        except Exception as error:  # such as a lost connection: nobody would see the thread's own traceback
            self._failure = f"{self._target}: {type(error).__name__} {error}"

    def _manifest(self, step: int, sums: dict[str, Checksum], record: dict[str, Any]) -> Manifest:
        """Return the manifest of a new checkpoint, after renaming the checkpoints in `passed_over` and emptying it."""
        number = layout.next_save_number(self.folder)
        for path in self.passed_over:
            self._say([f"{path} was passed over: kept as {layout.set_aside(path).name}"])
        self.passed_over = []
        return Manifest(step, number, sums, record)

    def carry(self, find: Callable[[], Mapping[str, Path]]) -> None:
        """Copy config and tokenizer of the model that the run started from to the folder hf/ beside its checkpoints.

        Every checkpoint gets a copy of that folder. Collective over all ranks; `find`, which returns the files' paths
        by name, is called on rank 0 alone.

        Raises:
            CheckpointError: on all ranks, if a file cannot be copied, or hf/ is a link.
        """

        def copy() -> None:
            home = self.folder / layout.CARRIED
            if home.is_symlink():
                raise CheckpointError(f"{home} is a link, and files would be copied into it: put a folder there")
            for name, file in find().items():
                home.mkdir(exist_ok=True)
                (home / name).unlink(missing_ok=True)  # writing would follow a link
                try:
                    shutil.copyfile(file, home / name)
                except OSError as error:
                    if error.errno in DISK_FULL_ERRNOS:  # or it would name the source
                        raise CheckpointError(write_error(home / name, error, file.stat().st_size)) from None
                    raise

        on_all_ranks(self.group, lambda: copy() if self.first else None)

    def _finish_save(self, record: dict[str, Any]) -> None:
        """Write the file `latest` and remove old checkpoints; say what could not be removed. On rank 0 alone.

        `record` has the best step, whose checkpoint stays under checkpoint.keep_best.
        """
        layout.write_latest(self.folder, self._target.name)
        best_step = record["best"]["step"] if self.options.keep_best else -1
        keeps = self.options.keep_last, self.options.keep_every, best_step
        self._say(layout.remove_old(self.folder, self._target, *keeps))
