"""Reading of input files in spans: lines or whole files, decompressed, from disk or a URL.

Formats (titanmoe.data.formats) build on `RecordReader`. A malformed line or row is a result (`BadRecord`), which the
caller refuses or counts; a malformed file raises a ConfigError.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from titanmoe.config import ConfigError
from titanmoe.data.decompress import COMPRESSED, open_decompressed
from titanmoe.data.remote import is_url, open_url, url_errors

MIB = 1 << 20
RENAME = (
    'write "from" as "role" ("human" as "user", "gpt" as "assistant") and "value" as "content" '
    "(docs/fine-tuning.md#other-forms-of-chats has the lines of Python)"
)
"""What makes messages of ShareGPT's."""
OTHER_FORMS = {
    "conversations": "chats in that field are read with --format chat --field conversations (data.format, data.field); "
    f"if they are ShareGPT's, {RENAME}",
    "instruction": "Alpaca's records are read once each is a chat in a field messages (--format chat, data.format): "
    "instruction and input are what the user says, output what the assistant says "
    "(docs/fine-tuning.md#other-forms-of-chats has the lines of Python)",
}
"""How records of another form are read, by a field that tells the form."""


class BadRecord(NamedTuple):
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
    """At a URL, the version that its store states."""

    @property
    def compressed(self) -> bool:
        return self.file.endswith(COMPRESSED)

    def span(self, start: int, stop: int, bytes: int) -> Span:
        return Span(self.file, self.kind, start, stop, bytes)


class RecordReader:
    """What a format reads a span by. `at` is how far into its bytes the reading is.

    most_mb: of one document, uncompressed. A longer one ends the reading whatever is done about bad lines, since
    skipping it would mean uncompressing it.
    """

    def __init__(
        self,
        span: Span,
        field: str,
        most_mb: int = 128,
        any_of_fields: tuple[str, ...] = (),
        optional_fields: tuple[str, ...] = (),
    ):
        """any_of_fields: fields whose values are read too, where there are any; a record's value is then all of them by
        name, and `field` need not be there. optional_fields: the same, of records that have `field`."""
        self.span, self.field, self.at, self.empty = span, field, 0, False
        self.any_of_fields, self.optional_fields = any_of_fields, optional_fields
        self.most_mb, self.most = most_mb, most_mb * MIB

    def read_all(self) -> bytes:
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
        with open_url(file) if is_url(file) else open(file, "rb") as stream:
            while start and (block := stream.read(min(start, 1 << 24))):
                before, start = before + block.count(b"\n"), start - len(block)
    return f"{file}:{before + number}"


def decode_line(line: bytes, where: Callable[[], str]) -> str | BadRecord:
    """A line's text, without its end."""
    try:
        return line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(f"{where()}: byte {error.start} of the line is not UTF-8 ({error.reason})")


def describe_missing_field(where: str, field: str, names: list[str]) -> str:
    """What is said where a record has other fields than that."""
    hint = f"it has {', '.join(map(repr, names[:12])) or 'none'}"
    if "messages" in names and field == "text":
        return f"{where}: has no field {field!r}, {hint}: a chat is read with --format chat (data.format)"
    if form := next((form for column, form in OTHER_FORMS.items() if column in names), ""):
        return f"{where}: has no field {field!r}, {hint}: {form}"
    what = "the list of messages" if field == "messages" else "text"
    fix = f"name the one that holds {what} with --field (data.field, or data.fields for each path)"
    return f"{where}: has no field {field!r}, {hint}: {fix}"


def json_type_name(value: Any) -> str:
    """What a value is called in JSON."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


class file_errors:
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
        if is_url(self.file):
            with url_errors(self.file):
                raise error
