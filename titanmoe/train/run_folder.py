"""The run's folder: how a run chooses it, locks it against other processes, and removes lines of steps to be repeated.

A run that continues uses {job.dump_folder}/{job.name} and holds a lock on the file `lock`. Any other run takes a new
folder: that one, or name-2, name-3, ...
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from titanmoe.checkpoint import choose_checkpoint, layout, safe_files
from titanmoe.config import ConfigError
from titanmoe.config.schema import Checkpoint, Config, Job

METRICS, LOCK = "metrics.jsonl", "lock"
EXPERTS, RANKS, QUIZ = "experts.jsonl", "ranks.jsonl", "quiz.jsonl"
EVENTS, CONFIG, SAMPLE = "events.jsonl", "config.toml", "first_sample.txt"
OLD_QUIZ = "answers.jsonl"
"""Name of quiz.jsonl in the folders of earlier versions."""
ROLLOUTS = "rollouts.jsonl"
"""File with completions of prompts of reinforcement learning, and their rewards."""
ROUNDS = "rounds.jsonl"
"""File with the number of completions of each round of reinforcement learning, written when the round begins."""
FILES = METRICS, EXPERTS, RANKS, QUIZ, OLD_QUIZ, EVENTS, ROLLOUTS, ROUNDS
"""JSONL files of a run, of whose lines each has a step."""
EVALUATION_TIMES = "val_s", "quiz_s", "samples_s"
"""Metrics of metrics.jsonl that are the seconds of an evaluation, which step_time_s leaves out."""
REPEATED_EVENTS = "spike", "skip", "divergence", "samples", "reward"
"""Kinds of events that a step writes that is made a second time after a resume."""
COMMAND = "TITANMOE_COMMAND"
"""Environment variable in which `titanmoe train` stores the command that the user typed."""


def typed_command(without: str = "") -> str:
    """Return the shell command that started this run, without an option such as "--checkpoint.load" and its value."""
    typed, words = iter(shlex.split(os.environ.get(COMMAND, "")) or sys.argv), []
    for word in typed:
        if without and word == without:
            next(typed, "")
        elif not (without and word.startswith(f"{without}=")):
            words.append(word)
    return shlex.join(words)


class RunFolder:
    """Folder of the run, which rank 0 chooses and locks against other processes."""

    def __init__(self, job: Job, checkpoint: Checkpoint, rank: int):
        self.job, self.checkpoint, self.rank = job, checkpoint, rank
        self.path: Path | None = None  # until it is claimed
        self._lock: TextIO | None = None

    def claim(self) -> Path:
        """Choose and create the folder on rank 0, store its path in `path` on all ranks and return it.

        The folder of a run that may continue from its own checkpoints is locked until `unlock`. Collective over the
        world.

        Raises:
            ConfigError: on all ranks, if the folder cannot be written to, has links, or is locked by another process.
        """
        import torch.distributed as dist

        result: list[Any] = [None]
        if self.rank == 0:
            try:
                result[0], self._lock = claim_folder(self.job, self.checkpoint)
            except ConfigError as error:
                result[0] = error
        dist.broadcast_object_list(result, 0)
        if isinstance(result[0], ConfigError):
            raise result[0]
        self.path = result[0]
        return self.path

    @contextlib.contextmanager
    def cleaned_up_if_refused(self) -> Iterator[None]:
        """Remove the files that `claim` made if the run's start, the body of this context, raises a ConfigError.

        These are the lock or the empty metrics.jsonl, and folders that are then empty.
        """
        try:
            yield
        except ConfigError:
            # The lock is closed once training ends, for whatever reason.
            lock, metrics = self._lock, self.path / METRICS
            if self.rank == 0 and (not lock.closed if lock else metrics.stat().st_size == 0):
                (self.path / LOCK if lock else metrics).unlink()
                for inner in (choose_checkpoint.checkpoints_folder(self.path, self.checkpoint), self.path):
                    with contextlib.suppress(OSError):  # it is not empty, or was never made
                        inner.rmdir()
            raise

    def unlock(self) -> None:
        if self._lock:
            self._lock.close()


def claim_folder(job: Job, checkpoint: Checkpoint) -> tuple[Path, TextIO | None]:
    """Choose and create the run's folder. Only one rank may call this.

    A run that continues uses {dump_folder}/{name} and locks it. Any other run gets a new folder: that one, or name-2,
    name-3, ... if it is taken. It claims the folder by creating metrics.jsonl, so two that start at once never share
    one.

    Returns:
        The folder, and for a run that continues the open lock file. Closing that file releases the lock.

    Raises:
        ConfigError: if the folder cannot be written to or has symbolic links, or another process holds the lock.
    """
    parent, name = Path(job.dump_folder), job.name or "run"
    folder, n = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(folder, checkpoint.folder)
            if choose_checkpoint.is_resumable(checkpoint):
                return folder, _open_lock(folder)
            (folder / METRICS).touch(exist_ok=False)
            return folder, None
        except OSError as error:
            if not (isinstance(error, FileExistsError) and folder.is_dir()):
                raise ConfigError(
                    f"job.dump_folder: cannot write to {folder.absolute()}: {error.strerror}: name another folder"
                ) from None
        n += 1
        folder = parent / f"{name}-{n}"


def _open_lock(folder: Path) -> TextIO:
    """Lock the run's folder, write this process's id and host into the lock file, and return that, open.

    Raises a ConfigError if another process holds the lock. Closing the file releases it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND  # which does not erase what the owner wrote
    stream = os.fdopen(safe_files.open_in(folder, LOCK, flags), "a+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.seek(0)
        owner = stream.read(200).strip() or "another process"
        stream.close()
        raise ConfigError(
            f"a run is alive in {folder.absolute()} ({owner}), and this one would continue there: wait for it, "
            "stop it, or start this one as a separate run with another --job.name"
        ) from None
    if os.fstat(stream.fileno()).st_nlink == 0:  # a refused start has just removed it
        stream.close()
        return _open_lock(folder)
    stream.truncate(0)
    started = datetime.now(timezone.utc).isoformat(" ", timespec="seconds").removesuffix("+00:00")
    stream.write(f"process {os.getpid()} on {socket.gethostname()}, since {started} UTC\n")
    stream.flush()
    return stream


def refuse_links(folder: Path, checkpoints: str) -> None:
    """Raise a ConfigError if a run's folder has symbolic links, through which the run would write elsewhere.

    Links in W&B's folder are allowed, and so are those in the checkpoints' folder, which the saver handles. If
    these two are within `folder`, they may not be links themselves.

    Args:
        folder: the run's folder, which need not exist.
        checkpoints: checkpoint.folder: the checkpoints' folder, within `folder` or absolute.
    """
    skipped = {folder / "wandb", folder / checkpoints}
    for path, folders, files in os.walk(folder):
        if links := [name for name in (*folders, *files) if os.path.islink(os.path.join(path, name))]:
            link = Path(path, sorted(links)[0])
            raise ConfigError(
                f"{link} is a link to {os.readlink(link)}, and a run only writes into its own folder: put the file "
                "or folder itself there (checkpoint.folder may be elsewhere), or name another --job.name"
            )
        folders[:] = [name for name in folders if Path(path, name) not in skipped]


def refuse_live_folder(config: Config) -> None:
    """Raise a ConfigError if this run would continue in a folder that a live run has locked or that has symbolic links.

    A run that takes a new folder is never refused. The folder is not locked afterwards: `claim_folder` does that.
    """
    if not choose_checkpoint.is_resumable(config.checkpoint):
        return
    folder = choose_checkpoint.run_folder(config.job)
    refuse_links(folder, config.checkpoint.folder)
    if (folder / LOCK).exists():
        with contextlib.suppress(OSError):  # `claim_folder` says what is wrong with the folder
            _open_lock(folder).close()


def rewind(folder: Path, step: int) -> None:
    """Remove lines after `step`, from which the run resumes, from its JSONL files; at step 0 rename the files instead.

    Of later events only those of REPEATED_EVENTS are removed: that the run was started or saved remains true. Renamed
    files are metrics-1.jsonl, experts-1.jsonl, ..., or with the next number that is free. Only one rank may call this.
    """
    if step == 0 and (folder / METRICS).exists() and (folder / METRICS).stat().st_size:
        n = 1
        while (folder / f"metrics-{n}.jsonl").exists():
            n += 1
        for name in FILES:
            if (file := folder / name).exists():
                os.rename(file, folder / f"{file.stem}-{n}.jsonl")
    for name in FILES:
        lines = [*_read_lines(folder, name)]
        remaining = [line for line in lines if _is_still_true(line, step)]
        if len(remaining) < len(lines):
            fresh = folder / f"{name}.new"
            layout.write_text(fresh, "".join(remaining))
            os.replace(fresh, folder / name)


def read_records(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of a run's JSONL file, without those that a kill cut off; none if there is no file."""
    for line in _read_lines(folder, name):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        yield record


def _read_lines(folder: Path, name: str) -> Iterator[str]:
    if (folder / name).exists():
        with open(safe_files.open_in(folder, name), encoding="utf-8", errors="replace") as stream:
            yield from stream


def _is_still_true(line: str, step: int) -> bool:
    """Return whether a line of a JSONL file remains when a run resumes from `step`.

    Lines that are not valid are removed, and those about later steps, except events whose kind REPEATED_EVENTS lacks.
    """
    try:
        record = json.loads(line)
        return record["step"] <= step or record.get("kind", "spike") not in REPEATED_EVENTS
    except (ValueError, KeyError, TypeError, RecursionError):  # cut off by a kill, or written by something else
        return False
