"""What a checkpoint is on disk, without torch: where it is, when it counts as complete, which one is the latest.

    RUN/checkpoints/
        latest                    the name of the last one made, for people; what counts is the number in manifests
        step-00000120/            complete, because it has this name
            manifest.json         format, step, record (config, mapping, loader, ...), bytes and CRC-32 of every file
            tensors.json          shape and dtype of each tensor, and where its blocks are
            *.distcp              blocks of tensors, as torch.distributed.checkpoint spreads them over the ranks
            hf/                   the tokenizer, and the config.json of the Hugging Face model it came from, if any
            .metadata             for tools of PyTorch, if `titanmoe checkpoint dcp` was asked for it; never read
        step-00000180.writing/    being written; the next writer gives it its name if it is complete, else removes it
        step-00000060.removing/   being removed; never read
        step-00000150.passed-over/    could not be read when the run resumed from another; never removed

A checkpoint gets its name in one rename, after every byte of it is on disk. So whatever is killed at whatever moment,
each folder with a plain name is complete, and one that has its manifest lacks nothing but its name.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path

from titanmoe.checkpoint import manifest, safe_files
from titanmoe.checkpoint.manifest import Checksum, Manifest
from titanmoe.checkpoint.safe_files import (
    NOT_FOUND_ERRORS,
    CheckpointError,
    Unreadable,
    error_text,
    with_retries,
    write_error,
)

MANIFEST, LATEST, CARRIED, DCP_METADATA = "manifest.json", "latest", "hf", ".metadata"
CARRIED_BYTES = 1 << 30
"""Of one file that is copied along."""
WRITING, REMOVING, PASSED_OVER = ".writing", ".removing", ".passed-over"
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.(writing|removing(-\d+)?)$")
_BLOCK = 1 << 22


def folder_name(step: int) -> str:
    return f"step-{step:08}"


def step_of(path: Path) -> int:
    """From a checkpoint's name, or from what it begins with."""
    return int(_NAME.match(path.name)[1])


def read_manifest(folder: Path) -> Manifest:
    try:
        data = safe_files.read(folder, MANIFEST, manifest.MOST_BYTES)
    except NOT_FOUND_ERRORS:
        raise CheckpointError(_explain_absent(folder)) from None
    return manifest.parse(data, folder / MANIFEST)


def _explain_absent(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder"
    if (folder / DCP_METADATA).exists():
        return (
            f"{folder} is a bare torch.distributed.checkpoint without {MANIFEST}: titanmoe did not write it, and "
            "titanmoe convert --from-dcp reads TorchTitan's"
        )
    if folder.name.endswith((WRITING, REMOVING)):
        return f"{folder} was left by a writer that was interrupted: it is not complete"
    return f"{folder} contains no checkpoint: it has no {MANIFEST}"


# ---- finding


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a run's checkpoint folder by step, in order: everything with such a name."""
    by_step = {int(m[1]): folder / name for name in _entries(folder) if (m := _NAME.fullmatch(name))}
    return dict(sorted(by_step.items()))


def _entries(folder: Path) -> list[str]:
    try:
        return with_retries(folder, lambda: os.listdir(folder))
    except NOT_FOUND_ERRORS:
        return []


def read_latest(folder: Path) -> str:
    """The name in the file `latest`, "" without one."""
    try:
        return safe_files.read(folder, LATEST, 256).decode().strip()
    except (*NOT_FOUND_ERRORS, CheckpointError, UnicodeDecodeError):
        return ""


def newest_first(folder: Path, unfinished: bool = False) -> list[Path]:
    """Checkpoints, last made first; before them those that do not say when, so that they are not missed.

    unfinished: include those that lack only their name, which the run's next writer will give them.
    """
    checkpoints = list(checkpoints_by_step(folder).values())
    if unfinished:
        names = [name for name in _entries(folder) if _NAME.fullmatch(name.removesuffix(WRITING)) and WRITING in name]
        checkpoints += [folder / name for name in names if safe_files.exists(folder / name / MANIFEST)]
    latest_name = read_latest(folder)

    def rank(path: Path) -> tuple[float, bool, str]:
        return save_number(path), path.name == latest_name, path.name

    return sorted(checkpoints, key=rank, reverse=True)


def save_number(path: Path) -> float:
    """Its place in the order of the run's checkpoints; infinite if that cannot be read."""
    try:
        return read_manifest(path).number
    except CheckpointError:
        return math.inf


def find_damage(folder: Path, files: Iterable[str] | None = None, contents: bool = True) -> list[str]:
    """What is wrong with a checkpoint's files, one line each, naming the file. contents: also compare checksums."""
    expected = read_manifest(folder).files
    lines = (
        _damage_of(folder, name, expected[name], contents) for name in sorted(expected if files is None else files)
    )
    return [line for line in lines if line]


def _damage_of(folder: Path, name: str, expected: Checksum, contents: bool) -> str:
    """What is wrong with a file, if anything is."""
    file = folder / name
    try:
        size = with_retries(file, lambda: os.lstat(safe_files.safe_path(folder, name)).st_size)
        if size != expected.bytes:
            return f"{file} has {size:,} bytes but was written with {expected.bytes:,}"
        if contents and (crc := with_retries(file, lambda: compute_crc32(folder, name, size))) != expected.crc32:
            return f"{file} has CRC-32 {crc:08x} but was written with {expected.crc32:08x}: its contents have changed"
    except NOT_FOUND_ERRORS:
        return f"{file} is missing"
    except Unreadable:
        raise
    except CheckpointError as error:
        return str(error)
    return ""


def compute_crc32(folder: Path, name: str, size: int) -> int:
    crc = 0
    with safe_files.open_file(folder, name) as stream:
        while size > 0 and (block := stream.read(min(size, _BLOCK))):
            crc, size = zlib.crc32(block, crc), size - len(block)
    return crc


def read_intact(folder: Path, name: str, expected: Checksum) -> bytes:
    """A whole file of a checkpoint; CheckpointError unless it is what was written."""
    try:
        data = safe_files.read(folder, name, expected.bytes)
    except NOT_FOUND_ERRORS:
        raise CheckpointError(f"{folder / name} is missing") from None
    if len(data) != expected.bytes or zlib.crc32(data) != expected.crc32:
        raise CheckpointError(f"{folder / name} is not what was written: its contents have changed")
    return data


def carried_files(folder: Path) -> dict[str, Path]:
    """Files of a Hugging Face model that were copied along with a checkpoint, by name."""
    names = [name.removeprefix(f"{CARRIED}/") for name in read_manifest(folder).files if name.startswith(f"{CARRIED}/")]
    return {name: require_regular(folder, f"{CARRIED}/{name}") for name in sorted(names) if "/" not in name}


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a run's own folder, if it exists."""
    names = (name for name in sorted(_entries(folder)) if not (folder / name).is_dir())
    return {name: require_regular(folder.parent, f"{folder.name}/{name}") for name in names}


def require_regular(folder: Path, name: str) -> Path:
    """Its path, if it is a file of the folder that is not reached by a link; else CheckpointError."""
    try:
        return safe_files.safe_path(folder, name)
    except NOT_FOUND_ERRORS:
        raise CheckpointError(f"{folder / name} is missing") from None


# ---- writing


def clean_up_interrupted(folder: Path) -> list[str]:
    """Finish or remove what interrupted writers left; returns what to report."""
    notes = []
    for name in _entries(folder):
        entry, target = folder / name, folder / name.removesuffix(WRITING)
        if name.endswith(WRITING) and not entry.is_symlink() and safe_files.exists(entry / MANIFEST):
            if broken := _damage_text(entry):
                notes.append(
                    f"{entry} was completely written but is damaged, {broken}: kept as {set_aside(entry).name}"
                )
            else:
                notes += _rename_into_place(entry, target)
                notes.append(
                    f"{target} was complete but for its name when its writer was interrupted: it has been renamed"
                )
        elif _LEFT.search(name) or name.startswith(LATEST + "."):
            notes += erase(entry)
    return notes


def _damage_text(folder: Path) -> str:
    try:
        return "; ".join(find_damage(folder, contents=False))
    except Unreadable:
        raise
    except CheckpointError as error:
        return str(error)


def make_empty(unfinished: Path) -> None:
    """An empty folder to write a checkpoint in, next to where it will appear."""
    if unfinished.is_symlink() or not unfinished.is_dir():
        unfinished.unlink(missing_ok=True)
    else:
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def erase_incomplete(unfinished: Path) -> None:
    """Remove what a failed save has written, unless it lacks nothing but its name; what cannot be removed stays."""
    if not unfinished.is_symlink() and not os.path.lexists(unfinished / MANIFEST):
        erase(unfinished)


def leftover_bytes(folder: Path) -> int:
    """Return the bytes that the next start will free: of saves that were interrupted, and of removals."""
    names = [name for name in _entries(folder) if _LEFT.search(name) and not os.path.islink(folder / name)]
    left = [folder / name for name in names if not os.path.lexists(folder / name / MANIFEST) or WRITING not in name]
    return sum(file.lstat().st_size for entry in left for file in entry.rglob("*") if file.is_file())


def check_files(folder: Path, files: dict[str, Checksum]) -> dict[str, Checksum]:
    """The files themselves, if their contents are right."""
    if broken := [
        line for name, expected in files.items() if (line := _damage_of(folder, name, expected, contents=True))
    ]:
        raise CheckpointError("; ".join(broken))
    return files


def publish(unfinished: Path, target: Path, manifest: Manifest) -> None:
    """Give a written checkpoint its name. Every file in it is on disk; the manifest comes last, completely or not at
    all."""
    new_file = unfinished / f"{MANIFEST}.new"
    write_text(new_file, manifest.text())
    os.rename(new_file, unfinished / MANIFEST)
    fsync_folder(unfinished)
    _rename_into_place(unfinished, target)


def _rename_into_place(unfinished: Path, target: Path) -> list[str]:
    """A checkpoint from an abandoned future, which this run went back from, may have the name."""
    replaced = _rename_with_suffix(target, REMOVING) if os.path.lexists(target) else None
    os.rename(unfinished, target)
    fsync_folder(target.parent)
    return erase(replaced) if replaced else []


def write_latest(folder: Path, name: str) -> None:
    """Point `latest` at a checkpoint."""
    new_file = folder / f"{LATEST}.new"
    write_text(new_file, name + "\n")
    os.replace(new_file, folder / LATEST)
    fsync_folder(folder)


def remove_old(folder: Path, newest: Path, keep_last: int, keep_every: int) -> list[str]:
    """Remove all but the last made and, if asked for, the multiples of a number of steps; returns what to report.

    newest has just been written and read back. Only what was made before it is removed; what cannot be read stays.
    """
    number_of = {path: save_number(path) for path in checkpoints_by_step(folder).values()}
    if not keep_last or number_of.get(newest, math.inf) == math.inf:
        return []
    older = sorted(
        (path for path in number_of if number_of[path] < number_of[newest]), key=number_of.__getitem__, reverse=True
    )
    notes = []
    for path in older[keep_last - 1 :]:
        step = step_of(path)
        if not (keep_every and step % keep_every == 0):
            try:  # first it loses its name, in one rename, then its files
                notes += erase(_rename_with_suffix(path, REMOVING))
            except OSError as error:
                notes.append(f"cannot remove {path}: {error_text(error)}")
    return notes


def set_aside(path: Path) -> Path:
    """Rename it to something that no start looks for and no retention removes."""
    return _rename_with_suffix(path, PASSED_OVER)


def _rename_with_suffix(path: Path, suffix: str) -> Path:
    plain, n = path.name.removesuffix(WRITING) + suffix, 1
    while os.path.lexists(renamed := path.with_name(plain if n == 1 else f"{plain}-{n}")):
        n += 1
    os.rename(path, renamed)
    return renamed


def erase(path: Path) -> list[str]:
    """Remove a folder, or a link but not its target; returns what to report. What cannot be removed does not end the
    run."""
    try:
        if path.is_symlink():
            link_target = os.readlink(path)
            path.unlink()
            return [
                f"{path.with_name(_LEFT.sub('', path.name))} was a link: it has been removed, and {link_target} has not"
            ]
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        return [f"cannot remove {path}: {error_text(error)}"]
    return []


def write_text(file: Path, text: str) -> None:
    try:
        with open(safe_files.open_in(file.parent, file.name, safe_files.WRITE), "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:  # which has the name only if opening failed
        raise CheckpointError(write_error(file, error, len(text.encode()))) from None


def fsync_folder(folder: Path) -> None:
    """Directories need this as much as files, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def next_save_number(folder: Path) -> int:
    numbers = [0]
    for path in checkpoints_by_step(folder).values():
        with contextlib.suppress(CheckpointError):
            numbers.append(read_manifest(path).number)
    return 1 + max(numbers)
