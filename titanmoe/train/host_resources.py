"""Memory and disk space of this machine: the host's memory, and the disk for a run's checkpoints.

Memory is that of the machine, or of the container or job that the process runs in, in bytes, 0 if unknown. A run whose
checkpoints do not fit on the disk is refused before it starts, and not at its first save.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.choose_checkpoint import checkpoints_folder, is_resumable, run_folder
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.files import format_bytes
from titanmoe.models.count import parameters, trained_parameters
from titanmoe.models.tensors import Tuning
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS

CGROUPS = Path("/sys/fs/cgroup")


def resident_memory() -> int:
    """Return the bytes of resident memory of this process."""
    return _read_bytes("/proc/self/status", "VmRSS:")


def memory_limit() -> int:
    """Return in bytes the smallest of the machine's memory and the limits of all control groups of the process.

    0 if none of them can be read, as on systems without /proc.
    """
    limits = [_read_bytes("/proc/meminfo", "MemTotal:")]
    for line in _lines("/proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, file = (CGROUPS / "memory", "memory.limit_in_bytes") if kinds else (CGROUPS, "memory.max")
        for folder in (root / path.lstrip("/") / "x").parents:
            with contextlib.suppress(OSError, ValueError):  # none, or "max"
                limits.append(int((folder / file).read_text(encoding="utf-8")))
    return min((size for size in limits if size > 0), default=0)


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _read_bytes(file: str, name: str) -> int:
    """Return in bytes the KiB on the first line of a file in /proc that begins with `name`; 0 without line or file."""
    return next((int(line.split()[1]) * 1024 for line in _lines(file) if line.startswith(name)), 0)


def checkpoint_bytes(config: Config) -> int:
    """Return an estimate of the bytes of a checkpoint of all ranks: weights and the optimizer's state.

    With LoRA these are the adapters' alone; otherwise frozen weights count too, in training.mixed_precision_param.
    """
    training, tuning = config.training, Tuning.of(config)
    trained = trained_parameters(config.model, tuning)
    # Weights under adapters are not saved; other frozen weights are, in the dtype of their memory.
    frozen = 0 if tuning.rank else parameters(config.model).total - trained
    optimizer = OPTIMIZERS.look_up(config.optimizer.name)
    moments = optimizer.state_numbers(config) * optimizer.moment_width(config)
    stored, held = (WIDTHS[dtype] for dtype in (training.dtype, training.mixed_precision_param))
    return trained * stored + moments + frozen * held


def disk_shortage(config: Config, step: int = 0) -> str:
    """Return a message if the disk has no room for the run's checkpoints; "" if it has, or if its size is unknown.

    Room is needed for checkpoint.keep_last checkpoints, with checkpoint.keep_best one more, and the one being written,
    or fewer if the run saves less often. Checkpoints that the run has already take no further room. With
    checkpoint.keep_last = 0, which removes none, only the next one has to fit. Files of an interrupted save count as
    free space, because the start removes them.

    Args:
        step: the step that the run resumes from, or 0.
    """
    options, run = config.checkpoint, run_folder(config.job)
    if not options.enable or not (saves := _saves(options.interval, step, config.training.steps)):
        return ""
    folder = checkpoints_folder(run, options)
    existing = len(layout.checkpoints_by_step(folder)) if is_resumable(options) else 0
    most = options.keep_last + bool(options.keep_best)
    number = max(1, min(saves, most + 1 - existing)) if options.keep_last else 1
    each, disk = checkpoint_bytes(config), next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        usage, left = shutil.disk_usage(disk), layout.leftover_bytes(folder) if is_resumable(options) else 0
    except OSError:  # the saver reports it
        return ""
    free = usage.free + left
    if number * each <= free or not usage.total:  # some file systems do not know
        return ""
    which = f"{number} checkpoints of about {format_bytes(each)} have" if number > 1 else ""
    which = which or f"a checkpoint of about {format_bytes(each)} has"
    limited, best = 1 < number == most + 1 - existing, ", the best" * bool(options.keep_best)
    keeps = f" (checkpoint.keep_last = {options.keep_last}{best}, and the one being written)" if limited else ""
    lower = "lower checkpoint.keep_last, " if number > 2 else ""  # with 1 there are 2 at one time
    return (
        f"{which} to fit{keeps} in {folder.absolute()}, and only {format_bytes(free)} are free there: make room, "
        f"{lower}name another checkpoint.folder or job.dump_folder, or save nothing with --checkpoint.enable false"
    )


def _saves(interval: int, step: int, steps: int) -> int:
    """Return how many times a run saves after `step`: at every multiple of the interval (0: none), and at its end."""
    if step >= steps:
        return 0
    return steps // interval - step // interval + (steps % interval > 0) if interval else 1
