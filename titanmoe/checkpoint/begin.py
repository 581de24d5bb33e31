"""Where a run begins: anew, from a checkpoint of its own, or from one of another run. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.layout import CheckpointError
from titanmoe.config.schema import Config


def continues(config: Config) -> bool:
    """Whether a run of this name is one run, however often it is started; else each start gets a folder of its own."""
    return config.checkpoint.enable and config.checkpoint.load != "none"


def run_folder(config: Config) -> Path:
    """Of a run that continues."""
    return Path(config.job.dump_folder) / (config.job.name or "run")


def checkpoints_of(run: Path, config: Config) -> Path:
    folder = Path(config.checkpoint.folder)
    return folder / run.name if folder.is_absolute() else run / folder


def has_begun(config: Config) -> bool:
    """Whether the run has a checkpoint of its own to go on from."""
    try:
        return continues(config) and bool(layout.steps(checkpoints_of(run_folder(config), config)))
    except CheckpointError:  # told where it is loaded
        return False


@dataclass
class Beginning:
    path: Path | None = None
    model_only: bool = False
    said: list[str] = field(default_factory=list)
    """What was passed over on the way, and why."""


def choose(config: Config, run: Path, damage: Callable[[Path], list[str]]) -> Beginning:
    """The checkpoint that [checkpoint] load asks for; damage(folder) lists what is wrong with one."""
    asked = config.checkpoint.load
    if asked == "none":
        return Beginning()
    own = checkpoints_of(run, config) if config.checkpoint.enable else None
    if asked.isdecimal():
        return Beginning(_step(own, int(asked), damage))
    found = _best(own, damage) if own else Beginning()
    if found.path is not None or asked == "auto":
        return found
    given = _given(Path(asked), damage)
    return Beginning(given.path, config.checkpoint.model_only, found.said + given.said)


def _best(folder: Path, damage: Callable[[Path], list[str]]) -> Beginning:
    """The first candidate that is sound."""
    said: list[str] = []
    for path in layout.candidates(folder):
        try:
            broken = damage(path)
        except CheckpointError as error:
            broken = [str(error)]
        if not broken:
            named = layout.latest(folder)
            if named and named != path.name and not said:
                said.append(f"{folder / layout.LATEST} names {named}, which is not there: taking {path.name}")
            return Beginning(path, said=said)
        said.append(f"passing over {path.name}: {'; '.join(broken)}")
    return Beginning(said=said)


def _step(own: Path | None, step: int, damage: Callable[[Path], list[str]]) -> Path:
    if own is None:
        raise CheckpointError(
            f"checkpoint.load = {step} is a step of this run's own checkpoints, which checkpoint.enable = false does "
            "not look for: enable it, or give the path"
        )
    there = layout.steps(own)
    if step not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise CheckpointError(f"checkpoint.load = {step}: {own} has no such step; it has {listed}")
    _sound(there[step], damage)
    return there[step]


def _given(path: Path, damage: Callable[[Path], list[str]]) -> Beginning:
    if (path / layout.MANIFEST).exists():
        _sound(path, damage)
        return Beginning(path)
    for folder in (path, path / "checkpoints"):
        if layout.steps(folder):
            found = _best(folder, damage)
            if found.path is None:
                raise CheckpointError(
                    f"checkpoint.load = {path}: no checkpoint there is sound: {'; '.join(found.said)}"
                )
            return found
    layout.read_manifest(path)  # says what the folder is instead
    raise CheckpointError(f"checkpoint.load = {path} holds no checkpoint")


def _sound(path: Path, damage: Callable[[Path], list[str]]) -> None:
    if broken := damage(path):
        raise CheckpointError(f'{"; ".join(broken)}: load another step, or set checkpoint.load = "auto"')


def record_ahead(config: Config) -> dict[str, Any]:
    """The record of the checkpoint that this run will go on from, {} if none: read before anything is built.

    Only manifests are looked at; a damaged file elsewhere in it is found when it is loaded.
    """
    try:
        found = choose(config, run_folder(config), lambda path: [])
        return {} if found.path is None or found.model_only else layout.read_manifest(found.path).record
    except CheckpointError:
        return {}  # told where it is loaded, on one rank
