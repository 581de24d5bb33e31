"""The layout of checkpoints on disk: where they are, when one counts as complete, which is the latest. Without torch.

    RUN/checkpoints/latest            name of the last one made, for people; what counts is the number in manifests
    RUN/checkpoints/step-00000120/    complete: it gets this name in one rename, after every byte is on disk
        manifest.json, tensors.json   step, record, bytes and CRC-32 of every file; where the blocks of tensors are
        *.distcp, hf/, .metadata      blocks of tensors; tokenizer and config.json; for tools of PyTorch, never read

Suffixes: .writing (the next start gives it its name if it is complete, else removes it), .removing, and .passed-over
(could not be read when the run resumed from another, never removed).
"""

from __future__ import annotations

import math
import os
import re
import shutil
import zlib
from pathlib import Path

from titanmoe.checkpoint import manifest, safe_files
from titanmoe.checkpoint.manifest import Checksum, Manifest
from titanmoe.checkpoint.safe_files import NOT_FOUND_ERRORS, CheckpointError, Unreadable, error_text, with_retries
from titanmoe.files import fsync_folder, stream_crc32, write_error

MANIFEST, LATEST, CARRIED, DCP_METADATA = "manifest.json", "latest", "hf", ".metadata"
CARRIED_BYTES = 1 << 30
"""Limit on the bytes of one file that is copied into hf/."""
WRITING, REMOVING, PASSED_OVER = ".writing", ".removing", ".passed-over"
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.(writing|removing(-\d+)?)$")


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint, such as step-00000120."""
    return f"step-{step:08}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.json; CheckpointError, in one line, if it is absent or damaged."""
    try:
        data = safe_files.read(folder, MANIFEST, manifest.MOST_BYTES)
    except NOT_FOUND_ERRORS:
        raise CheckpointError(_explain_absent(folder)) from None
    return manifest.parse(data, folder / MANIFEST)


def _explain_absent(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder: name that of a run or of a checkpoint"
    if (folder / DCP_METADATA).exists():
        return (
            f"{folder} is a bare torch.distributed.checkpoint without {MANIFEST}: titanmoe did not write it, and "
            "titanmoe convert --from-dcp reads TorchTitan's"
        )
    if folder.name.endswith((WRITING, REMOVING)):
        return f"{folder} was left by a writer that was interrupted, and is not complete: {safe_files.ANOTHER}"
    return f"{folder} contains no checkpoint, as there is no {MANIFEST}: name the folder of a run or of a checkpoint"


# ---- finding


BEST = "best"
"""Suffix of a run's name that stands for its best checkpoint (checkpoint.keep_best)."""


def best_step(checkpoint: Path) -> int:
    """Return the best step of the run up to a checkpoint, by its record; -1 if it has none or cannot be read."""
    try:
        return read_manifest(checkpoint).record.get("best", {}).get("step", -1)
    except CheckpointError:
        return -1


def resolve_step(path: Path) -> Path:
    """Return the folder of the checkpoint that RUN:best or RUN:STEP names; other paths, and any that exists, unchanged.

    Raises:
        CheckpointError: the run keeps no best checkpoint, or has none of this step.
    """
    name, _, wanted = path.name.rpartition(":")
    if not name or not (wanted == BEST or wanted.isdecimal()) or safe_files.exists(path):
        return path
    run = path.with_name(name)
    for folder in (run, safe_files.refuse_link(run / "checkpoints")):
        by_step = checkpoints_by_step(folder)
        for step in map(best_step, newest_first(folder)) if wanted == BEST else [int(wanted)]:
            if step in by_step:
                return safe_files.refuse_link(by_step[step])
    if wanted == BEST:
        why = "keeps no best checkpoint: train it with checkpoint.keep_best, or name a checkpoint"
    else:
        why = f"has no checkpoint of step {wanted}: titanmoe checkpoint ls {run} lists those that it has"
    raise CheckpointError(f"{run} {why}")


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """Return the folders of all complete checkpoints in a folder, by step in ascending order; {} if it is absent.

    Complete is what has the name of one, step-NNNNNNNN. Raises Unreadable if the disk does not answer.
    """
    by_step = {int(m[1]): folder / name for name in _entries(folder) if (m := _NAME.fullmatch(name))}
    return dict(sorted(by_step.items()))


def checkpoints_in(path: Path) -> list[Path]:
    """Return the folders of all checkpoints that a path stands for, in ascending order of step.

    The path of one checkpoint, or RUN:best or RUN:STEP, stands for that one, the folder of a run or of its checkpoints
    for all checkpoints in it. Their manifests are not read.

    Raises:
        CheckpointError: the folder holds no checkpoint.
    """
    path = resolve_step(path)
    if safe_files.exists(path / MANIFEST):
        return [path]
    for folder in (path, safe_files.refuse_link(path / "checkpoints")):
        if by_step := checkpoints_by_step(folder):
            return list(by_step.values())
    raise CheckpointError(_explain_absent(path))


def _entries(folder: Path) -> list[str]:
    try:
        return with_retries(folder, lambda: os.listdir(folder))
    except NOT_FOUND_ERRORS:
        return []


def read_latest(folder: Path) -> str:
    """Return the name of the last checkpoint made, from the file `latest` beside it in `folder`; "" if unreadable."""
    try:
        return safe_files.read(folder, LATEST, 256).decode().strip()
    except (*NOT_FOUND_ERRORS, CheckpointError, UnicodeDecodeError):
        return ""


def newest_first(folder: Path, unfinished: bool = False) -> list[Path]:
    """Return the paths of a run's checkpoints, the last written first; those with unreadable manifests come before all.

    Args:
        folder: the folder of a run's checkpoints.
        unfinished: include checkpoints that lack only their final name, which the next start of the run will give them.
    """
    checkpoints = list(checkpoints_by_step(folder).values())
    if unfinished:
        names = [name for name in _entries(folder) if _NAME.fullmatch(name.removesuffix(WRITING)) and WRITING in name]
        checkpoints += [folder / name for name in names if safe_files.exists(folder / name / MANIFEST)]
    latest_name = read_latest(folder)
    return sorted(checkpoints, key=lambda path: (save_number(path), path.name == latest_name, path.name), reverse=True)


def save_number(path: Path) -> float:
    """Return a checkpoint's number in the order in which the run wrote them; infinite without a readable manifest."""
    try:
        return read_manifest(path).number
    except CheckpointError:
        return math.inf


def find_damage(folder: Path, contents: bool = True, rank: int = 0, ranks: int = 1) -> list[str]:
    """Return a line for each file of a checkpoint that is missing or damaged; [] if all are intact.

    Files that the manifest does not list are not looked at.

    Args:
        folder: the checkpoint.
        contents: whether to read the files and compare checksums, and not only sizes.
        rank: which of the ranks that share the work this is; only its part of the files is checked.
        ranks: the number of ranks that share the work.

    Raises:
        CheckpointError: the manifest is missing or damaged; Unreadable if the disk does not answer.
    """
    expected = read_manifest(folder).files
    names = sorted(expected)[rank::ranks]
    return [line for name in names if (line := _damage_of(folder, name, expected[name], contents))]


def require_intact(path: Path) -> Path:
    """Return the path of a checkpoint unchanged; CheckpointError if a file is missing or has another size.

    Contents are not read, apart from the manifest's, which must be intact.
    """
    if broken := find_damage(path, contents=False):
        raise CheckpointError("; ".join(broken))
    return path


def _damage_of(folder: Path, name: str, expected: Checksum, contents: bool) -> str:
    """Return a line on what is wrong with one file of a checkpoint; "" if it is intact.

    Without `contents` only the size is compared. Raises Unreadable if the disk does not answer.
    """
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
    """Return the CRC-32 of the first `size` bytes of the file `name` in a folder, or of all if it has fewer."""
    with safe_files.open_file(folder, name) as stream:
        return stream_crc32(stream, size)


def read_intact(folder: Path, name: str, expected: Checksum) -> bytes:
    """Return the contents of a checkpoint's file, `folder/name`.

    Raises:
        CheckpointError: the file is missing, or its length or CRC-32 is not the expected one.
    """
    try:
        data = safe_files.read(folder, name, expected.bytes)
    except NOT_FOUND_ERRORS:
        raise CheckpointError(f"{folder / name} is missing", safe_files.ANOTHER) from None
    if len(data) != expected.bytes or zlib.crc32(data) != expected.crc32:
        raise CheckpointError(f"{folder / name} has changed since it was written", safe_files.ANOTHER)
    return data


def carried_files(folder: Path) -> dict[str, Path]:
    """Return the paths of the Hugging Face files (config, tokenizer) in a checkpoint's subfolder hf/, by name.

    Their contents are not compared with the manifest.

    Raises:
        CheckpointError: the manifest is damaged, or a file that it lists is missing or a link.
    """
    names = [name.removeprefix(f"{CARRIED}/") for name in read_manifest(folder).files if name.startswith(f"{CARRIED}/")]
    return {name: require_regular(folder, f"{CARRIED}/{name}") for name in sorted(names) if "/" not in name}


def files_in(folder: Path) -> dict[str, Path]:
    """Return the paths of a folder's files by name, without subfolders; {} if there is no folder.

    CheckpointError if a file is a link.
    """
    names = (name for name in sorted(_entries(folder)) if not (folder / name).is_dir())
    return {name: require_regular(folder.parent, f"{folder.name}/{name}") for name in names}


def require_regular(folder: Path, name: str) -> Path:
    """Return the resolved path of the regular file `name` in the folder; CheckpointError if it is missing or a link.

    Links within Hugging Face's cache are followed.
    """
    try:
        return safe_files.safe_path(folder, name)
    except NOT_FOUND_ERRORS:
        raise CheckpointError(f"{folder / name} is missing", "put the file back") from None


# ---- writing


def clean_up_interrupted(folder: Path) -> list[str]:
    """Complete or remove what killed writers left in the folder of a run's checkpoints; return lines for the log.

    A checkpoint that lacks only its final name is renamed, or set aside under another name if a file is missing or of
    another size. Other unfinished saves and removals are deleted. One rank calls it when a run starts, before anything
    is saved.
    """
    notes = []
    for name in _entries(folder):
        entry, target = folder / name, folder / name.removesuffix(WRITING)
        if name.endswith(WRITING) and not entry.is_symlink() and safe_files.exists(entry / MANIFEST):
            if broken := _damage_text(entry):
                notes.append(
                    f"{entry} was completely written but is damaged, {broken}: kept as {set_aside(entry).name}"
                )
            else:
                notes += rename_into_place(entry, target)
                notes.append(
                    f"{target} was complete but for its name when its writer was interrupted: it has been renamed"
                )
        elif _LEFT.search(name) or name.startswith(LATEST + "."):
            notes += erase(entry)
    return notes


def _damage_text(folder: Path) -> str:
    """Return what is wrong with a checkpoint by its manifest and the sizes of its files, in one line; "" if intact."""
    try:
        return "; ".join(find_damage(folder, contents=False))
    except Unreadable:
        raise
    except CheckpointError as error:
        return error.problem


def make_empty(unfinished: Path) -> None:
    """Create an empty folder, or empty an existing one. A link is replaced, not followed."""
    if unfinished.is_symlink() or not unfinished.is_dir():
        unfinished.unlink(missing_ok=True)
    else:
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def erase_incomplete(unfinished: Path) -> None:
    """Remove the folder of a failed save, unless it has a manifest and lacks only its final name. Ignore OSErrors."""
    if not unfinished.is_symlink() and not os.path.lexists(unfinished / MANIFEST):
        erase(unfinished)


def leftover_bytes(folder: Path) -> int:
    """Return the bytes in a run's checkpoints folder that its next start will free: interrupted saves and removals."""
    names = [name for name in _entries(folder) if _LEFT.search(name) and not os.path.islink(folder / name)]
    left = [folder / name for name in names if not os.path.lexists(folder / name / MANIFEST) or WRITING not in name]
    return sum(file.lstat().st_size for entry in left for file in entry.rglob("*") if file.is_file())


def check_files(folder: Path, files: dict[str, Checksum]) -> dict[str, Checksum]:
    """Read files of a folder and return `files`; CheckpointError if one has another size or CRC-32."""
    lines = (_damage_of(folder, name, expected, contents=True) for name, expected in files.items())
    if broken := list(filter(None, lines)):
        raise CheckpointError("; ".join(broken))
    return files


def publish(unfinished: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose other files are on disk, then rename its folder to `target`.

    A kill at any moment leaves either no manifest, or a complete checkpoint that lacks only its name, which
    `clean_up_interrupted` gives it at the next start. What `target` was before is removed last. Raises a
    CheckpointError or OSError if that fails.
    """
    replace_file(unfinished / MANIFEST, manifest.text().encode())
    rename_into_place(unfinished, target)


def rename_into_place(unfinished: Path, target: Path) -> list[str]:
    """Rename a completely written folder to `target`; return lines for the log.

    What has that name already, such as a checkpoint of a run that went back to an earlier step, gets the
    suffix .removing before and is removed after.
    """
    replaced = _rename_with_suffix(target, REMOVING) if os.path.lexists(target) else None
    os.rename(unfinished, target)
    fsync_folder(target.parent)
    return erase(replaced) if replaced else []


def write_latest(folder: Path, name: str) -> None:
    """Write the name of a run's latest checkpoint to the file `latest` in the checkpoints' folder, atomically."""
    replace_file(folder / LATEST, f"{name}\n".encode())


def remove_old(folder: Path, newest: Path, keep_last: int, keep_every: int, best_step: int = -1) -> list[str]:
    """Remove old checkpoints; return lines for the log on what could not be removed, [] if all could be.

    Args:
        folder: the folder of a run's checkpoints.
        newest: the checkpoint that has just been written and read back. Only checkpoints written before it are removed,
            and those whose manifest cannot be read stay.
        keep_last: how many of the newest checkpoints to keep, `newest` among them; 0 keeps all.
        keep_every: also keep checkpoints whose step is a multiple of this; 0 keeps no others.
        best_step: also keep the checkpoint of this step; -1 keeps no other.
    """
    step_of = {path: step for step, path in checkpoints_by_step(folder).items()}
    number_of = {path: save_number(path) for path in step_of}
    if not keep_last or number_of.get(newest, math.inf) == math.inf:
        return []
    older = sorted(
        (path for path in number_of if number_of[path] < number_of[newest]), key=number_of.__getitem__, reverse=True
    )
    notes = []
    for path in older[keep_last - 1 :]:
        if step_of[path] != best_step and not (keep_every and step_of[path] % keep_every == 0):
            try:  # first it loses its name, in one rename, then its files
                notes += erase(_rename_with_suffix(path, REMOVING))
            except OSError as error:
                notes.append(f"cannot remove {path}: {error_text(error)}")
    return notes


def set_aside(path: Path) -> Path:
    """Rename a checkpoint to NAME.passed-over, which no start reads and no retention removes; return its new path.

    A number follows if that name is taken.
    """
    return _rename_with_suffix(path, PASSED_OVER)


def _rename_with_suffix(path: Path, suffix: str) -> Path:
    """Rename NAME or NAME.writing to NAME plus `suffix`, and a number if that is taken; return the new path."""
    plain, n = path.name.removesuffix(WRITING) + suffix, 1
    while os.path.lexists(renamed := path.with_name(plain if n == 1 else f"{plain}-{n}")):
        n += 1
    os.rename(path, renamed)
    return renamed


def erase(path: Path) -> list[str]:
    """Remove a file, a folder, or a link but not its target. An OSError is not raised but returned.

    Returns:
        Lines for the log: one if the path was a link or could not be removed, else none.
    """
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
    """Write a text file over any old one, not through a link, and fsync it; CheckpointError if that fails."""
    try:
        safe_files.write(file.parent, file.name, text.encode(), fsync=True)
    except OSError as error:  # which has the name only if opening failed
        raise CheckpointError(write_error(file, error, len(text.encode()))) from None


def replace_file(file: Path, data: bytes) -> None:
    """Write a file completely or not at all, through FILE.new; CheckpointError if that fails, as on a full disk."""
    new_file = file.with_name(f"{file.name}.new")
    try:
        safe_files.write(file.parent, new_file.name, data, fsync=True)
        os.replace(new_file, file)
        fsync_folder(file.parent)
    except OSError as error:
        erase(new_file)
        raise CheckpointError(write_error(new_file, error, len(data))) from None


def next_save_number(folder: Path) -> int:
    """Return the number for a new checkpoint's manifest: one more than the highest readable one in the folder, or 1."""
    numbers = map(save_number, checkpoints_by_step(folder).values())
    return 1 + int(max((number for number in numbers if number < math.inf), default=0))
