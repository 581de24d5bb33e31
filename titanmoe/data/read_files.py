"""From the names a user gives to documents: files, folders and globs, compressed or not; how a file of each format is
read is in titanmoe.data.formats.

What is wrong with a line or a row is a result (`Bad`), which the caller refuses or counts; what is wrong with a file is
a ConfigError.
"""

from __future__ import annotations

import glob
import io
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
from titanmoe.data.formats import FORMATS

MIB = 1 << 20


class Bad(NamedTuple):
    """What is wrong, and with what."""

    why: str


class Record(NamedTuple):
    where: Callable[[], str]
    value: Any


@dataclass(frozen=True)
class Span:
    """A part of a source: bytes [start, stop) of its file, meaning the lines that begin there, unless its format says
    otherwise. `bytes` is how much of the input it is."""

    file: str
    kind: str
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True)
class InputFile:
    file: str
    kind: str
    """The name of the format that reads it."""
    bytes: int
    mtime_ns: int

    @property
    def compressed(self) -> bool:
        return self.file.endswith(COMPRESSED)

    def span(self, start: int, stop: int, bytes: int) -> Span:
        return Span(self.file, self.kind, start, stop, bytes)


# ---- which files


def find_files(paths: list[str], format: str) -> list[InputFile]:
    """Every file that the paths name, in their order; the files of a folder sorted by name."""
    rules = FORMATS.look_up(format)
    inputs: list[InputFile] = []
    problems: list[str] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = [file for file in _walk(path) if rules.takes(_extension(file))]
            if not files:
                problems.append(f"{name!r} contains no files" + (f" of format {format}" if format != "auto" else ""))
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            files = [file for match in matches for file in (_walk(match) if match.is_dir() else [match])]
            files = [file for file in files if file in matches or rules.takes(_extension(file))]
            if not files:
                problems.append(f"{name!r} does not exist (looked for {path.absolute()})")
        for file in files:
            stat, kind = file.stat(), rules.file_format(_extension(file)) or format
            inputs.append(InputFile(str(file), kind, stat.st_size, stat.st_mtime_ns))
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


# ---- what is in them


def spans(source: InputFile, size: int) -> Iterator[Span]:
    """The source in parts of about `size` bytes, as far as it can be entered in the middle."""
    with _file_errors(source.file):
        yield from FORMATS.look_up(source.kind).spans(source, size)


class Reader:
    """The documents of a span. `at` is how far into its bytes the reading is.

    most_mb: of one document, uncompressed. A longer one ends the reading whatever is done about bad lines, since
    skipping it would mean uncompressing it.
    """

    def __init__(self, span: Span, field: str, most_mb: int = 128):
        self.span, self.field, self.at, self.empty = span, field, 0, False
        self.most_mb, self.most = most_mb, most_mb * MIB

    def __iter__(self) -> Iterator[Record | Bad]:
        with _file_errors(self.span.file):
            yield from FORMATS.look_up(self.span.kind).read(self)
        if self.empty:
            yield Bad(f"{self.span.file} is empty")

    # What formats read by:

    def whole(self) -> bytes:
        """All of a file."""
        with open_decompressed(self.span.file) as (stream, _):
            data = stream.read(self.most + 1)
        if len(data) > self.most:
            raise self.too_long(self.span.file, "the text")
        self.at, self.empty = self.span.bytes, not data
        return data

    def lines(self) -> Iterator[tuple[Callable[[], str], bytes]]:
        """Where each line is, as a message says it, and the line."""
        span, compressed = self.span, self.span.file.endswith(COMPRESSED)
        with open_decompressed(span.file) as (stream, raw):
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
                yield where, line
        self.empty = compressed and not place

    def too_long(self, where: str, what: str) -> ConfigError:
        return ConfigError(
            [
                f"{where}: {what} has more than {self.most_mb} MiB unpacked, the limit for a document "
                "(max_document_mb): raise that, or leave it out"
            ]
        )

    def _line(self, stream: io.BufferedIOBase, where: Callable[[], str]) -> bytes:
        line = stream.readline(self.most + 1)
        if len(line) > self.most:
            raise self.too_long(where(), "the line")
        return line


def _line_number(file: str, start: int, number: int) -> str:
    """FILE:LINE, the line being the `number`th of those that begin at byte `start` or later: only counted when asked
    for."""
    before = 0
    if start:
        with open(file, "rb") as stream:
            while start and (block := stream.read(min(start, 1 << 24))):
                before, start = before + block.count(b"\n"), start - len(block)
    return f"{file}:{before + number}"


def decode(line: bytes, where: Callable[[], str]) -> str | Bad:
    """A line's text, without its end."""
    try:
        return line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        return Bad(f"{where()}: byte {error.start} of the line is not UTF-8 ({error.reason})")


def no_field(where: str, field: str, names: list[str]) -> str:
    """What is said where a record has other fields than that."""
    hint = f"it has {', '.join(map(repr, names[:12])) or 'none'}"
    if "messages" in names and field == "text":
        return f"{where}: has no field {field!r}, {hint}: a chat is read with --format chat (data.format)"
    fix = "name the one that holds text with --field (data.field, or data.fields for each path)"
    return f"{where}: has no field {field!r}, {hint}: {fix}"


def json_type_name(value: Any) -> str:
    """What a value is called in JSON."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


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
