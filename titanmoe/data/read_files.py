"""From paths that a user gives to records: files, folders, globs, URLs, data sets on the hub, read by their formats.

Called by tokenization and `titanmoe tokenizer train`. Processes read spans of a large file independently.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from titanmoe.config import ConfigError
from titanmoe.data.decompress import COMPRESSED
from titanmoe.data.formats import FORMATS
from titanmoe.data.hub_datasets import fetch_files, is_hub_dataset
from titanmoe.data.record_reader import BadRecord, InputFile, Record, RecordReader, Span, file_errors
from titanmoe.data.remote import find_remote_files, is_url

# ---- paths to files


def find_files(paths: list[str], format: str) -> list[InputFile]:
    """Return all input files that the paths name, in the order of the paths; those of a folder sorted by path.

    Of a folder only files with the format's extensions are taken, and no hidden ones; a file that is named by itself or
    that a glob matches always. Data sets on the hub are downloaded if need be.

    Args:
        paths: files, folders, globs, URLs, and data sets on the hub.
        format: name of the data format, such as "auto".

    Raises:
        ConfigError: a path names no file, an empty one, or token shards.
    """
    spec = FORMATS.look_up(format)
    inputs: list[InputFile] = []
    problems: list[str] = []
    for name in paths:
        if is_url(name) or is_hub_dataset(name):
            inputs += _find_elsewhere(name, format, problems)
            continue
        path = Path(name).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = [file for file in walk(path) if spec.accepts(_uncompressed_extension(file))]
            if not files:
                problems.append(f"{name!r} contains no files" + (f" of format {format}" if format != "auto" else ""))
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            files = [file for match in matches for file in (walk(match) if match.is_dir() else [match])]
            # With **, folders match as well as the files inside them.
            files = [
                file for file in dict.fromkeys(files) if file in matches or spec.accepts(_uncompressed_extension(file))
            ]
            if not files:
                problems.append(f"{name!r} does not exist (looked for {path.absolute()})")
        for file in files:
            stat, kind = file.stat(), spec.file_format(_uncompressed_extension(file)) or format
            inputs.append(InputFile(str(file), kind, stat.st_size, stat.st_mtime_ns))
    shards = sorted({source.file.rpartition("/")[0] for source in inputs if Path(source.file).suffix == ".tokens"})
    problems += [
        f"{folder} holds token shards, which are a source of their own: "
        f"{'copy it to a disk and ' if is_url(folder) else ''}name it by itself"
        for folder in shards
    ]
    problems += [f"{source.file} is empty: remove it, or leave it out" for source in inputs if not source.bytes]
    if problems:
        raise ConfigError(problems)
    return inputs


def _find_elsewhere(name: str, format: str, problems: list[str]) -> list[InputFile]:
    """Return the input files at a URL, or of a data set on the hub, fetched if need be; [] if there are none.

    The URL is a file, folder or glob on a server or object store. Why there are none is appended to `problems` as
    messages. With the format "auto" each file's extension chooses its format.
    """
    spec = FORMATS.look_up(format)
    try:
        if is_url(name):
            candidates = [(InputFile(f.url, "", f.bytes, f.version), f.matched) for f in find_remote_files(name)]
        else:
            candidates = [
                (InputFile(str(f.path), "", f.path.stat().st_size, 0, f.identity), False) for f in fetch_files(name)
            ]
    except ConfigError as error:
        problems += error.problems
        return []
    by_extension = [(file, matched, _uncompressed_extension(Path(file.file))) for file, matched in candidates]
    taken = [(file, extension) for file, matched, extension in by_extension if matched or spec.accepts(extension)]
    if not taken:
        problems.append(f"{name!r} contains no files" + (f" of format {format}" if format != "auto" else ""))
    return [replace(file, kind=spec.file_format(extension) or format) for file, extension in taken]


def walk(root: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Return all files below root, sorted by path, without hidden files and folders and folders named in `skipped`."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


def _uncompressed_extension(file: Path) -> str:
    """Return a file's extension in lower case, without .gz or .zst."""
    return Path(file.stem).suffix.lower() if file.suffix in COMPRESSED else file.suffix.lower()


# ---- files to records


def split_spans(source: InputFile, size: int) -> Iterator[Span]:
    """Yield independent spans of a file, of about `size` bytes; one span if the file cannot be divided.

    Raises:
        ConfigError: the file cannot be read.
    """
    with file_errors(source.file):
        yield from FORMATS.look_up(source.kind).spans(source, size)


def read_records(reader: RecordReader) -> Iterator[Record | BadRecord]:
    """Yield the records of the reader's span by its format, and a `BadRecord` for each malformed one or an empty file.

    Raises:
        ConfigError: the file cannot be read, or a document is longer than the reader's limit.
    """
    with file_errors(reader.span.file):
        yield from FORMATS.look_up(reader.span.kind).read(reader)
    if reader.empty:
        yield BadRecord(f"{reader.span.file} is empty")
