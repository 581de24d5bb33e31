"""What a checkpoint is on disk, without torch: where it lies, when it counts as whole, which one is the latest.

    RUN/checkpoints/
        latest                    the name of the newest whole checkpoint
        step-00000120/            whole, for it has this name
            manifest.json         format, step, record (config, mapping, loader, ...), bytes and CRC-32 of every file
            .metadata  *.distcp   torch.distributed.checkpoint's own
            hf/                   config.json and tokenizer of the Hugging Face model it came from, if any
        step-00000180.writing/    being written; never read, removed by the next writer
        step-00000060.removing/   being removed; never read

A checkpoint gets its name in one rename, after every byte of it is on disk. So whatever is killed at whatever moment,
each folder with a plain name is whole. `latest` is replaced in one rename too; where it names nothing whole, readers
fall back to the newest whole one and say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanmoe.checkpoint.disk import unwritten
from titanmoe.config.parse_json import parse_json

FORMAT = 1
MANIFEST, LATEST, CARRIED = "manifest.json", "latest", "hf"
WRITING, REMOVING = ".writing", ".removing"
_NAME = re.compile(r"step-(\d{8,})")
_BLOCK = 1 << 22


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message is a line for the user, and names the file."""


@dataclass(frozen=True)
class Sum:
    """What a file must be."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    step: int
    number: int
    """Counts the checkpoints of a run in the order they were made; a run may go back to an earlier step."""
    files: dict[str, Sum]
    record: dict[str, Any] = field(default_factory=dict)
    """What the run was: config, mapping, loader, tokens, versions."""

    def text(self) -> str:
        files = {name: {"bytes": s.bytes, "crc32": f"{s.crc32:08x}"} for name, s in sorted(self.files.items())}
        return json.dumps(
            {"format": FORMAT, "step": self.step, "number": self.number, "record": self.record, "files": files},
            indent=1,
        )


def name_of(step: int) -> str:
    return f"step-{step:08}"


def read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
        version = data["format"]
        if not isinstance(version, int):
            raise ValueError(f"format {version!r}")
        if version <= FORMAT:
            files = {name: Sum(s["bytes"], int(s["crc32"], 16)) for name, s in data["files"].items()}
            return Manifest(data["step"], data["number"], files, data["record"])
    except FileNotFoundError:
        raise CheckpointError(_absent(folder)) from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__} {error}") from None
    raise CheckpointError(
        f"{folder} has checkpoint format {version}, this titanmoe reads up to {FORMAT}: "
        "use the version that wrote it, or newer"
    )


def _absent(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder"
    if (folder / ".metadata").exists():
        return f"{folder} is a bare torch.distributed.checkpoint without {MANIFEST}: titanmoe did not write it"
    if folder.name.endswith((WRITING, REMOVING)):
        return f"{folder} was left by a writer that was interrupted: it is not whole"
    return f"{folder} holds no checkpoint: it has no {MANIFEST}"


# ---- finding


def steps(folder: Path) -> dict[int, Path]:
    """The whole checkpoints of a run's checkpoint folder by step, in order of steps."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    found = {int(m[1]): Path(e.path) for e in entries if (m := _NAME.fullmatch(e.name)) and e.is_dir()}
    return dict(sorted(found.items()))


def latest(folder: Path) -> str:
    """The name that `latest` holds, "" without one."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def candidates(folder: Path) -> list[Path]:
    """Whole checkpoints, best first: what `latest` names, then the others from the last made to the first."""
    named = latest(folder)

    def rank(path: Path) -> tuple[bool, int, str]:
        try:
            number = read_manifest(path).number
        except CheckpointError:
            number = -1
        return path.name == named, number, path.name

    return sorted(steps(folder).values(), key=rank, reverse=True)


def damage(folder: Path, files: Iterable[str] | None = None, contents: bool = True) -> list[str]:
    """What is wrong with a checkpoint's files, a line each that names the file. contents: read and sum them too."""
    manifest = read_manifest(folder)
    return [
        line
        for name in sorted(manifest.files if files is None else files)
        if (line := _damaged(folder / name, manifest.files[name], contents))
    ]


def _damaged(file: Path, want: Sum, contents: bool) -> str:
    try:
        size = file.stat().st_size
        if size != want.bytes:
            return f"{file} has {size:,} bytes and was written with {want.bytes:,}"
        if contents and (crc := crc32(file)) != want.crc32:
            return f"{file} has CRC-32 {crc:08x} and was written with {want.crc32:08x}: its contents have changed"
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file}: {error.strerror}"
    return ""


def crc32(file: Path) -> int:
    crc = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def files(folder: Path) -> dict[str, Path]:
    """Those that lie in it, if it is there."""
    return {file.name: file for file in sorted(folder.iterdir()) if file.is_file()} if folder.is_dir() else {}


# ---- writing


def sweep(folder: Path) -> None:
    """Remove what interrupted writers left."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.name.endswith((WRITING, REMOVING)):
                shutil.rmtree(entry.path)
            elif entry.name.startswith(LATEST + "."):
                os.remove(entry.path)


def begin(aside: Path) -> None:
    """An empty folder to write a checkpoint in, aside from where it will appear."""
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def require(folder: Path, files: dict[str, Sum]) -> dict[str, Sum]:
    """The files themselves, if they hold what they should."""
    if broken := [line for name, want in files.items() if (line := _damaged(folder / name, want, contents=True))]:
        raise CheckpointError("; ".join(broken))
    return files


def publish(aside: Path, target: Path, manifest: Manifest) -> None:
    """Give a written checkpoint its name. Every file in it is on disk; the manifest comes last."""
    write(aside / MANIFEST, manifest.text())
    sync(aside)
    if target.exists():  # of another future, from which this run went back
        remove(target)
    os.rename(aside, target)
    sync(target.parent)


def point(folder: Path, name: str) -> None:
    """Make `latest` name a checkpoint."""
    fresh = folder / f"{LATEST}.new"
    write(fresh, name + "\n")
    os.replace(fresh, folder / LATEST)
    sync(folder)


def retain(folder: Path, keep_last: int, keep_every: int) -> None:
    """Remove all but the last made and, if asked for, the multiples of a number of steps."""
    if not keep_last:
        return
    ordered = candidates(folder)
    for path in ordered[keep_last:]:
        step = int(_NAME.fullmatch(path.name)[1])
        if not (keep_every and step % keep_every == 0):
            remove(path)


def remove(target: Path) -> None:
    """First it loses its name, in one rename, then its files."""
    doomed = target.with_name(target.name + REMOVING)
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(target, doomed)
    shutil.rmtree(doomed)


def write(file: Path, text: str) -> None:
    try:
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:  # which knows the name only if it could not be opened
        raise CheckpointError(unwritten(file, error, len(text.encode()))) from None


def sync(folder: Path) -> None:
    """Directories need it as files do, for a rename to survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def next_number(folder: Path) -> int:
    numbers = [0]
    for path in steps(folder).values():
        with contextlib.suppress(CheckpointError):
            numbers.append(read_manifest(path).number)
    return 1 + max(numbers)
