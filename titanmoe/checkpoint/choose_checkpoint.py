"""Where a run starts: from scratch, from a checkpoint of its own, or from another run's. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanmoe.checkpoint import inside, layout
from titanmoe.checkpoint.inside import CheckpointError, Unreadable
from titanmoe.config import ConfigError
from titanmoe.config.schema import Checkpoint as Options
from titanmoe.config.schema import Config, Job


def continues(options: Options) -> bool:
    """Whether a run of this name is one run, however often it is started; otherwise each start gets its own folder."""
    return options.enable and options.load != "none"


def run_folder(job: Job) -> Path:
    """The folder of a run that continues."""
    return Path(job.dump_folder) / (job.name or "run")


def checkpoints_of(run: Path, options: Options) -> Path:
    folder = Path(options.folder)
    return folder / run.name if folder.is_absolute() else run / folder


def has_begun(config: Config) -> bool:
    """Whether the run has a checkpoint of its own to resume from."""
    try:
        return continues(config.checkpoint) and _any(checkpoints_of(run_folder(config.job), config.checkpoint))
    except Unreadable as error:  # perhaps only on this rank: it must not assume that the run has not begun
        raise ConfigError([str(error)]) from None


@dataclass
class StartPoint:
    path: Path | None = None
    model_only: bool = False
    said: list[str] = field(default_factory=list)
    """Checkpoints that were passed over on the way, and why."""
    passed: list[Path] = field(default_factory=list)


def wanted_checkpoint(options: Options, run: Path, damage: Callable[[Path], list[str]]) -> StartPoint:
    """The checkpoint that [checkpoint] load asks for; damage(folder) lists what is wrong with one."""
    asked = options.load
    if asked == "none":
        return StartPoint()
    own = checkpoints_of(run, options) if options.enable else None
    if asked.isdecimal():
        return StartPoint(_step(own, int(asked), damage))
    if own is not None and _any(own):
        return _best(own, damage)
    if asked == "auto":
        return StartPoint()
    given = _given(Path(asked), damage)
    given.model_only = options.model_only
    return given


FROM_SCRATCH = "--checkpoint.load=none starts from scratch on purpose, in a folder of its own"


def _any(own: Path) -> bool:
    try:
        return bool(layout.candidates(own, unfinished=True)) or inside.exists(own / layout.LATEST)
    except Unreadable as error:
        raise Unreadable(
            f"{error}: it is unknown whether there are checkpoints to resume from; {FROM_SCRATCH}"
        ) from None


def _best(folder: Path, damage: Callable[[Path], list[str]], own: bool = True) -> StartPoint:
    """The first candidate that is sound. There are some: if none can be used, that must not mean starting from
    scratch."""
    named, passed = layout.latest(folder), {}
    for path in layout.candidates(folder, unfinished=own):
        try:
            broken = damage(path)
        except CheckpointError as error:
            broken = [str(error)]
        if not broken:
            said = [f"passing over {other.name}: {why}" for other, why in passed.items()]
            if named not in ("", path.name, *(other.name for other in passed)):
                why = "which is older" if inside.exists(folder / named) else "which does not exist"
                said.append(f"{folder / layout.LATEST} names {named}, {why}: taking {path.name}")
            return StartPoint(path, said=said, passed=list(passed))
        passed[path] = "; ".join(broken)
    why = [f"{path.name}: {reason}" for path, reason in passed.items()]
    if not why:
        why = [f"{layout.LATEST} names {named or 'nothing'}, but there is no checkpoint"]
    fix = f"repair them or move them away; {FROM_SCRATCH}"
    raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(why)}: {fix if own else 'name another'}")


def _step(own: Path | None, step: int, damage: Callable[[Path], list[str]]) -> Path:
    if own is None:
        raise CheckpointError(
            f"checkpoint.load = {step} is a step of this run's own checkpoints, which checkpoint.enable = false does "
            "not look for: enable it, or give the path"
        )
    by_step = layout.steps(own)
    if step not in by_step:
        listed = ", ".join(map(str, by_step)) or "none"
        raise CheckpointError(f"checkpoint.load = {step}: {own} has no such step; it has {listed}")
    _sound(by_step[step], damage)
    return by_step[step]


def _given(path: Path, damage: Callable[[Path], list[str]]) -> StartPoint:
    if inside.exists(path / layout.MANIFEST):
        _sound(path, damage)
        return StartPoint(path)
    for folder in (path, path / "checkpoints"):
        if layout.steps(folder):
            return _best(folder, damage, own=False)
    layout.read_manifest(path)  # says what the folder is instead
    raise CheckpointError(f"checkpoint.load = {path} contains no checkpoint")


def _sound(path: Path, damage: Callable[[Path], list[str]]) -> None:
    if broken := damage(path):
        raise CheckpointError(f'{"; ".join(broken)}: load another step, or set checkpoint.load = "auto"')


def record_ahead(config: Config) -> dict[str, Any]:
    """The record of the checkpoint that this run will resume from, {} if none: read before anything is built.

    Only manifests are read; a damaged file elsewhere in it is found when it is loaded. Every rank looks for itself: one
    that gets no answer must not continue as if there were none.
    """
    try:
        found = wanted_checkpoint(config.checkpoint, run_folder(config.job), _no_manifest)
        return layout.read_manifest(found.path).record if found.path is not None and not found.model_only else {}
    except Unreadable as error:
        raise ConfigError([str(error)]) from None
    except CheckpointError:
        return {}  # reported where it is loaded, on one rank


def _no_manifest(folder: Path) -> list[str]:
    layout.read_manifest(folder)
    return []
