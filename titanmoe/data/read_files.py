"""From the names a user gives to documents: files, folders and globs; text, JSONL and Parquet; compressed or not.

What is wrong with a line or a row is a result (`Bad`), which the caller refuses or counts; what is wrong with a file is
a ConfigError.
"""

from __future__ import annotations

import glob
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from titanmoe.config import ConfigError
from titanmoe.data.decompress import COMPRESSED, open_decompressed

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
MIB = 1 << 20
MOST_VALUES = 4_000_000
"""In one line of JSONL; a parsed value takes up to 100 bytes, however short it was in the file."""
MOST_ROWS = 256
"""Of Parquet, held at one time."""
MOST_RATIO = 256
"""Of a large Parquet row group, uncompressed to compressed: text comes to 3 to 20."""


class Bad(NamedTuple):
    """What is wrong, and with what."""

    why: str


class Record(NamedTuple):
    where: Callable[[], str]
    value: Any


@dataclass(frozen=True)
class InputFile:
    file: str
    kind: str
    bytes: int
    mtime_ns: int

    @property
    def compressed(self) -> bool:
        return self.file.endswith(COMPRESSED)


@dataclass(frozen=True)
class Span:
    """A part of a source: bytes [start, stop) of a JSONL file, meaning the lines that begin there; row groups [start,
    stop) of a Parquet file; all of any other. `bytes` is how much of the input it is."""

    file: str
    kind: str
    start: int
    stop: int
    bytes: int


# ---- which files


def find_files(paths: list[str], format: str) -> list[InputFile]:
    """Every file that the paths name, in their order; the files of a folder sorted by name."""
    inputs: list[InputFile] = []
    problems: list[str] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = [file for file in _walk(path) if _belongs(file, format)]
            if not files:
                problems.append(f"{name!r} contains no files" + (f" of format {format}" if format != "auto" else ""))
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            files = [file for match in matches for file in (_walk(match) if match.is_dir() else [match])]
            files = [file for file in files if file in matches or _belongs(file, format)]
            if not files:
                problems.append(f"{name!r} does not exist (looked for {path.absolute()})")
        for file in files:
            stat = file.stat()
            inputs.append(InputFile(str(file), _kind(file, format), stat.st_size, stat.st_mtime_ns))
    shards = sorted({str(Path(source.file).parent) for source in inputs if Path(source.file).suffix == ".tokens"})
    problems += [
        f"{folder} holds token shards, which are a source of their own: name it by itself" for folder in shards
    ]
    problems += [f"{source.file} is empty: remove it, or leave it out" for source in inputs if not source.bytes]
    if problems:
        raise ConfigError(problems)
    return inputs


def _walk(root: Path) -> list[Path]:
    """Every regular file below root except hidden ones, in an order that does not depend on the file system."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


def _extension(file: Path) -> str:
    return Path(file.stem).suffix.lower() if file.suffix in COMPRESSED else file.suffix.lower()


def _kind(file: Path, format: str) -> str:
    if format == "chat":
        return "parquet" if _extension(file) == ".parquet" else "jsonl"
    return FORMATS.get(_extension(file), "text") if format == "auto" else format


def _belongs(file: Path, format: str) -> bool:
    """Whether a folder's file belongs: data sets come with pages about themselves."""
    kind = FORMATS.get(_extension(file), "text")
    return format in ("auto", "text") or kind == format or (format == "chat" and kind != "text")


# ---- how they are divided


def spans(source: InputFile, size: int) -> Iterator[Span]:
    """The source in parts of about `size` bytes, as far as it can be entered in the middle."""
    if source.kind == "jsonl" and not source.compressed:
        for start in range(0, source.bytes, size):
            stop = min(start + size, source.bytes)
            yield Span(source.file, source.kind, start, stop, stop - start)
    elif source.kind == "parquet":
        groups = [g.total_byte_size for g in _row_groups(source.file)]
        scale, start = source.bytes / max(sum(groups), 1), 0
        while start < len(groups):
            stop, size_bytes = start + 1, groups[start]
            while stop < len(groups) and (size_bytes + groups[stop]) * scale <= size:
                size_bytes, stop = size_bytes + groups[stop], stop + 1
            yield Span(source.file, source.kind, start, stop, int(size_bytes * scale))
            start = stop
    else:
        yield Span(source.file, source.kind, 0, source.bytes, source.bytes)


# ---- what is in them


class Reader:
    """The documents of a span. `at` is how far into its bytes the reading is.

    most_mb: of one document, uncompressed. A longer one ends the reading whatever is done about bad lines, since
    skipping it would mean uncompressing it.
    """

    def __init__(self, span: Span, field: str, most_mb: int = 128):
        self.span, self.field, self.at = span, field, 0
        self.most_mb, self.most = most_mb, most_mb * MIB

    def _too_long(self, where: str, what: str) -> ConfigError:
        return ConfigError(
            [
                f"{where}: {what} has more than {self.most_mb} MiB unpacked, the limit for a document "
                "(max_document_mb): raise that, or leave it out"
            ]
        )

    def _line(self, stream: io.BufferedIOBase, where: Callable[[], str]) -> bytes:
        line = stream.readline(self.most + 1)
        if len(line) > self.most:
            raise self._too_long(where(), "the line")
        return line

    def __iter__(self) -> Iterator[Record | Bad]:
        """The field of each line or row; all of a text."""
        if self.span.kind == "text":
            return self._text()
        return self._parquet() if self.span.kind == "parquet" else self._jsonl()

    def _text(self) -> Iterator[Record | Bad]:
        with open_decompressed(self.span.file) as (stream, _), _file_errors(self.span.file):
            data = stream.read(self.most + 1)
            if len(data) > self.most:
                raise self._too_long(self.span.file, "the text")
        self.at = self.span.bytes
        if not data:
            yield Bad(f"{self.span.file} is empty")
            return
        try:
            yield Record(lambda: self.span.file, data.decode("utf-8"))
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            yield Bad(f"{self.span.file}:{line}: byte {error.start} is not UTF-8 ({error.reason})")

    def _jsonl(self) -> Iterator[Record | Bad]:
        span, compressed = self.span, self.span.file.endswith(COMPRESSED)
        with open_decompressed(span.file) as (stream, raw), _file_errors(span.file):
            place = start = span.start
            if start:
                stream.seek(start - 1)
                place = start = start - 1 + len(self._line(stream, partial(_line_number, span.file, start - 1, 1)))
            for number in count(1):
                where = partial(_line_number, span.file, start, number)
                if (place >= span.stop and not compressed) or not (line := self._line(stream, where)):
                    break
                place += len(line)
                self.at = min(raw.tell() if compressed else place - span.start, span.bytes)
                if not line.isspace():
                    yield _record(line, where, self.field)
            if compressed and not place:
                yield Bad(f"{span.file} is empty")

    def _parquet(self) -> Iterator[Record | Bad]:
        span = self.span
        with _file_errors(span.file):
            file = _parquet_file(span.file)
            names = file.schema_arrow.names
            if self.field not in names:
                raise ConfigError([_no_field(span.file, self.field, names)])
            rows = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
            row_number, rows_in_span, rows_done = sum(rows[: span.start]), max(sum(rows[span.start : span.stop]), 1), 0
            for group in range(span.start, span.stop):
                for batch in file.iter_batches(
                    self._rows_at_once(file, group), row_groups=[group], columns=[self.field]
                ):
                    column = batch.column(0)
                    for n in range(len(column)):
                        row_number, rows_done = row_number + 1, rows_done + 1
                        self.at = span.bytes * rows_done // rows_in_span
                        where = partial("{}: row {}".format, span.file, row_number)
                        if column.nbytes > self.most and column.slice(n, 1).nbytes > self.most:
                            raise self._too_long(where(), repr(self.field))
                        yield Record(where, column[n].as_py())

    def _rows_at_once(self, file: Any, group: int) -> int:
        """As many as fit into a few documents, if each were as long as its whole row group: a dictionary makes many
        long rows from one."""
        row_group = file.metadata.row_group(group)
        columns = [row_group.column(n) for n in range(row_group.num_columns)]
        field_columns = [column for column in columns if column.path_in_schema.split(".")[0] == self.field]
        uncompressed = sum(column.total_uncompressed_size for column in field_columns)
        compressed = sum(column.total_compressed_size for column in field_columns)
        if uncompressed > self.most and uncompressed > MOST_RATIO * compressed:
            raise self._too_long(
                f"{self.span.file}: row group {group + 1}",
                f"{self.field!r}, {compressed:,} bytes packed {MOST_RATIO} to 1,",
            )
        return max(1, min(MOST_ROWS, 2 * self.most // max(1, uncompressed)))


def _line_number(file: str, start: int, number: int) -> str:
    """FILE:LINE, the line being the `number`th of those that begin at byte `start` or later: only counted when asked
    for."""
    before = 0
    if start:
        with open(file, "rb") as stream:
            while start and (block := stream.read(min(start, 1 << 24))):
                before, start = before + block.count(b"\n"), start - len(block)
    return f"{file}:{before + number}"


def _record(line: bytes, where: Callable[[], str], field: str) -> Record | Bad:
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")
        if len(line) > MOST_VALUES and _count_values(line) > MOST_VALUES:
            return Bad(f"{where()}: has more than {MOST_VALUES:,} values, the limit for a line")
        record = json.loads(text)
    except UnicodeDecodeError as error:
        return Bad(f"{where()}: byte {error.start} of the line is not UTF-8 ({error.reason})")
    except ValueError as error:
        reason = getattr(error, "msg", str(error))
        return Bad(f"{where()}: is not JSON ({reason}): JSONL has one whole object per line")
    except RecursionError:
        return Bad(_too_deep(where()))
    if not isinstance(record, dict):
        return Bad(f"{where()}: is {json_type_name(record)}, not an object: JSONL has one object per line")
    if field not in record:
        return Bad(_no_field(where(), field, list(record)))
    value = record[field]
    try:
        has_surrogate = "\\u" in text and _has_surrogate(value)
    except RecursionError:
        return Bad(_too_deep(where()))
    if has_surrogate:
        return Bad(f"{where()}: {field!r} holds half a surrogate pair (\\ud800 to \\udfff), which is not a character")
    return Record(where, value)


def _too_deep(where: str) -> str:
    return f"{where}: JSON nested too deeply: no parser accepts a thousand nested lists"


def _count_values(line: bytes) -> int:
    """About how many values the line has, by its commas and brackets; or more than MOST_VALUES."""
    plain, values, inside = line.replace(b"\\\\", b"").replace(b'\\"', b""), 0, False
    for start in range(0, len(plain), MIB):
        parts = plain[start : start + MIB].split(b'"')
        for part in parts[inside::2]:
            values += 1 + part.count(b",") + part.count(b"[") + part.count(b"{")
        inside ^= len(parts) % 2 == 0
        if values > MOST_VALUES:
            break
    return values


def json_type_name(value: Any) -> str:
    """What a value is called in JSON."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


def _has_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _no_field(where: str, field: str, names: list[str]) -> str:
    hint = f"it has {', '.join(map(repr, names[:12])) or 'none'}"
    if "messages" in names and field == "text":
        return f"{where}: has no field {field!r}, {hint}: a chat is read with --format chat (data.format)"
    fix = "name the one that holds text with --field (data.field, or data.fields for each path)"
    return f"{where}: has no field {field!r}, {hint}: {fix}"


# ---- Parquet


def _parquet_file(file: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError([f"{file}: reading Parquet needs the package pyarrow: pip install pyarrow"]) from None
    return pyarrow.parquet.ParquetFile(file)


def _row_groups(file: str) -> list[Any]:
    with _file_errors(file):
        metadata = _parquet_file(file).metadata
        return [metadata.row_group(n) for n in range(metadata.num_row_groups)]


class _file_errors:
    """What a file's own format says of it, with its name."""

    def __init__(self, file: str):
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, (ConfigError, GeneratorExit)):
            return
        if isinstance(error, EOFError):
            raise ConfigError([f"{self.file}: ends in the middle of packed data: it is truncated"]) from None
        if isinstance(error, RecursionError):
            raise ConfigError([f"{self.file} is nested too deeply to be read"]) from None
        module = type(error).__module__.partition(".")[0]
        if isinstance(error, (OSError, zlib.error)) or module in ("zstandard", "compression", "pyarrow", "_zstd"):
            text = " ".join(str(error).split())
            raise ConfigError([f"{self.file} cannot be read: {text}"]) from None
