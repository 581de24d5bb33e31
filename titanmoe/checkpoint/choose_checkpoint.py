"""Choose where a run starts: from scratch, from a checkpoint of its own, or from another run's.

The trainer calls it when it loads; the launcher reads the record beforehand, so this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.safe_files import CheckpointError, Unreadable
from titanmoe.config import ConfigError
from titanmoe.config.schema import Checkpoint as Options
from titanmoe.config.schema import Config, Job


def is_resumable(options: Options) -> bool:
    """Return whether a run with these options resumes when it is started a second time under the same job.name.

    checkpoint.enable and checkpoint.load decide. If it does not, each start gets a folder of its own.
    """
    return options.enable and options.load != "none"


def run_folder(job: Job) -> Path:
    """Return the folder of a run that resumes when started again: {job.dump_folder}/{job.name}; "run" if unnamed."""
    return Path(job.dump_folder) / (job.name or "run")


def checkpoints_folder(run: Path, options: Options) -> Path:
    """Return the folder that holds a run's checkpoints, given the run's folder and [checkpoint] of its config.

    It is in the run's folder, or under checkpoint.folder by the run's name if that option is an absolute path.
    """
    folder = Path(options.folder)
    return folder / run.name if folder.is_absolute() else run / folder


def has_begun(config: Config) -> bool:
    """Return whether the run's own folder has checkpoints to resume from; ConfigError if the disk does not answer.

    Damaged ones count, and a file `latest` without any. False if checkpoint.load = "none" or checkpoint.enable = false.
    Not collective: every rank looks.
    """
    try:
        return is_resumable(config.checkpoint) and _has_checkpoints(
            checkpoints_folder(run_folder(config.job), config.checkpoint)
        )
    except Unreadable as error:  # perhaps only on this rank: it must not assume that the run has not begun
        raise ConfigError(str(error)) from None


@dataclass
class StartPoint:
    """The checkpoint that a run starts from, and what to tell the user about the choice."""

    path: Path | None = None
    """The checkpoint's folder; None: from scratch."""
    model_only: bool = False
    """Whether only weights are loaded, and the run begins at step 0."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log: which newer checkpoints could not be used, and why."""
    passed_over: list[Path] = field(default_factory=list)
    """Newer checkpoints that could not be used."""


def choose_start(options: Options, run: Path, damage: Callable[[Path], list[str]]) -> StartPoint:
    """Return the checkpoint that checkpoint.load asks for, or with "auto" the run's newest intact one.

    Its path is None for "none", and for "auto" in a run without checkpoints. A number is a step of the run's own
    checkpoints. A path counts only until the run has checkpoints; a start from it alone is `model_only`, if
    checkpoint.model_only says so. With checkpoint.enable = false the run's own are not looked for. Not collective,
    unless `damage` is.

    Args:
        options: [checkpoint] of the run's config.
        run: the run's folder.
        damage: returns a line for each thing that is wrong with a checkpoint's folder; none if it is intact.

    Raises:
        CheckpointError: there are checkpoints and none can be used, or the one asked for is damaged or absent.
    """
    if options.load == "none":
        return StartPoint()
    own_folder = checkpoints_folder(run, options) if options.enable else None
    if options.load.isdecimal():
        return StartPoint(_checkpoint_of_step(own_folder, int(options.load), damage))
    if own_folder is not None and _has_checkpoints(own_folder):
        return _newest_intact(own_folder, damage)
    if options.load == "auto":
        return StartPoint()
    start = start_from_path(Path(options.load), damage)
    start.model_only = options.model_only
    return start


def base_weights_name(options: Options) -> str:
    """Return the name of the frozen weights on which a new run trains LoRA adapters; "" for random weights.

    It is checkpoint.initial_hf or, with checkpoint.model_only, the checkpoint that checkpoint.load names.
    """
    return options.initial_hf or (options.load if options.model_only else "")


FROM_SCRATCH = "--checkpoint.load=none starts from scratch on purpose, in a folder of its own"


def _has_checkpoints(folder: Path) -> bool:
    """Return whether a folder has checkpoints, even damaged or without their final name, or just the file `latest`."""
    try:
        return bool(layout.newest_first(folder, unfinished=True)) or safe_files.exists(folder / layout.LATEST)
    except Unreadable as error:
        raise Unreadable(
            f"{error}: it is unknown whether there are checkpoints to resume from; {FROM_SCRATCH}"
        ) from None


def _newest_intact(folder: Path, damage: Callable[[Path], list[str]], is_own_run: bool = True) -> StartPoint:
    """Return a start from the last written intact checkpoint in a folder, with notes on later ones that cannot be used.

    Args:
        folder: the checkpoints of a run.
        damage: returns a line for each thing that is wrong with a checkpoint's folder; none if it is intact.
        is_own_run: whether they are checkpoints of the run that starts, not of another run that it loads from; if so,
            those that lack only their final name count too.

    Raises:
        CheckpointError: there is none, or none is intact. Starting from scratch instead would silently lose the run.
    """
    latest_name, passed_over = layout.read_latest(folder), {}
    for path in layout.newest_first(folder, unfinished=is_own_run):
        try:
            broken = damage(safe_files.refuse_link(path))
        except CheckpointError as error:
            broken = [error.problem]
        if not broken:
            notes = [f"passing over {other.name}: {reason}" for other, reason in passed_over.items()]
            if latest_name not in ("", path.name, *(other.name for other in passed_over)):
                status = "which is older" if safe_files.exists(folder / latest_name) else "which does not exist"
                notes.append(f"{folder / layout.LATEST} names {latest_name}, {status}: taking {path.name}")
            return StartPoint(path, notes=notes, passed_over=list(passed_over))
        passed_over[path] = "; ".join(broken)
    reasons = [f"{path.name}: {reason}" for path, reason in passed_over.items()]
    if not reasons:
        reasons = [f"{layout.LATEST} names {latest_name or 'nothing'}, but there is no checkpoint"]
    fix = f"repair them or move them away; {FROM_SCRATCH}"
    raise CheckpointError(
        f"no checkpoint in {folder} can be used: {'; '.join(reasons)}: {fix if is_own_run else 'name another'}"
    )


def _checkpoint_of_step(folder: Path | None, step: int, damage: Callable[[Path], list[str]]) -> Path:
    """Return the folder of a step's checkpoint, and try no other; CheckpointError if it is absent, damaged, a link."""
    if folder is None:
        raise CheckpointError(
            f"checkpoint.load = {step} is a step of this run's own checkpoints, which checkpoint.enable = false does "
            "not look for: enable it, or give the path"
        )
    by_step = layout.checkpoints_by_step(folder)
    if step not in by_step:
        fix = f"choose from {', '.join(map(str, by_step))}" if by_step else "there are no checkpoints yet, use auto"
        raise CheckpointError(f"checkpoint.load = {step}: {folder} has no such step: {fix}")
    _check_intact(safe_files.refuse_link(by_step[step]), damage)
    return by_step[step]


def start_from_path(path: Path, damage: Callable[[Path], list[str]]) -> StartPoint:
    """Return a start from a checkpoint's folder, or from the newest intact checkpoint of a run's folder.

    Args:
        path: the folder of a checkpoint, of a run, or of a run's checkpoints; RUN:best and RUN:STEP name one of these.
        damage: returns a line for each thing that is wrong with a checkpoint's folder; none if it is intact.

    Raises:
        CheckpointError: there is no checkpoint, or none is intact.
    """
    path = layout.resolve_step(path)
    checkpoints = layout.checkpoints_in(path)
    if checkpoints != [path]:
        return _newest_intact(checkpoints[0].parent, damage, is_own_run=False)
    _check_intact(path, damage)
    return StartPoint(path)


def _check_intact(path: Path, damage: Callable[[Path], list[str]]) -> None:
    if broken := damage(path):
        raise CheckpointError(f'{"; ".join(broken)}: load another step, or set checkpoint.load = "auto"')


def record_to_resume(config: Config) -> dict[str, Any]:
    """Return the manifest's record of the checkpoint that this run will resume from; {} if it resumes from none.

    The record has the config, mapping, step and tokens of the run that saved. Only manifests are read: loading may find
    other files damaged and pass it over for an older checkpoint. Also {} if only weights are loaded, and if checkpoints
    are damaged or absent, which loading reports. Not collective: every rank looks.

    Raises:
        ConfigError: the file system does not answer, so it is unknown whether there is a checkpoint.
    """
    return checkpoint_to_resume(config)[1]


def checkpoint_to_resume(config: Config) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder and the manifest's record of the checkpoint that this run will resume from; (None, {}) if none.

    Only manifests are read: loading may find other files damaged and pass it over for an older checkpoint. Also
    (None, {}) if checkpoints are damaged or absent, which loading reports, and if only weights are loaded. Not
    collective: every rank looks.

    Raises:
        ConfigError: the file system does not answer, so it is unknown whether there is a checkpoint.
    """
    try:
        start = choose_start(config.checkpoint, run_folder(config.job), _manifest_damage)
        if start.path is None or start.model_only:
            return None, {}
        return start.path, layout.read_manifest(start.path).record
    except Unreadable as error:
        raise ConfigError(str(error)) from None
    except CheckpointError:
        return None, {}  # reported where it is loaded, on one rank


def _manifest_damage(folder: Path) -> list[str]:
    """Return []: only the manifest of a checkpoint is checked here. CheckpointError if it is absent or damaged."""
    layout.read_manifest(folder)
    return []
