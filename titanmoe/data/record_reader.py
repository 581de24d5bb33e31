"""Reading of input files in spans: lines or whole files, decompressed, from disk or a URL.

Formats (titanmoe.data.formats) build on `RecordReader`. A malformed line or row is a result (`BadRecord`), which the
caller refuses or counts; a malformed file raises a ConfigError.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

from titanmoe.config import ConfigError
from titanmoe.data.decompress import COMPRESSED, open_decompressed
from titanmoe.data.remote import is_url, open_url, url_errors

MIB = 1 << 20
CHAT_LAYOUTS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"))
"""Fields that a record of each layout of chats has to have; the first tells the layout."""
OTHER_FORMATS = {"preference": (("chosen", "rejected"),), "chat": CHAT_LAYOUTS}
"""Fields of records that other formats read, by format."""


class BadRecord(NamedTuple):
    """A malformed record: `why` is a message with its place and what is wrong."""

    why: str


class Record(NamedTuple):
    """A record of the input: its value, and a function that returns its place as text, for messages.

    The value is the field that the format reads, a text in most; or a dict of fields, if it reads several.
    """

    where: Callable[[], str]
    value: Any


@dataclass(frozen=True)
class Span:
    """A range of an input file that one process reads at a time.

    `kind` is the name of the file's format. `start` and `stop` are bytes, meaning the lines that begin between them,
    unless the format says otherwise. `bytes` is how much of the input the span is.
    """

    file: str
    kind: str
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True)
class InputFile:
    """A file of the input, on disk or at a URL."""

    file: str
    kind: str
    """Name of the format that reads it."""
    bytes: int
    mtime_ns: int
    """Modification time; at a URL a hash of the version that the store reports; 0 for a file from the hub."""
    identity: str = ""
    """Identity of a file from the hub in place of its path, the same on every machine; "" for others."""

    @property
    def compressed(self) -> bool:
        return self.file.endswith(COMPRESSED)

    def span(self, start: int, stop: int, bytes: int) -> Span:
        """Return the span from `start` to `stop` of this file (units: `Span`), which is `bytes` of the input."""
        return Span(self.file, self.kind, start, stop, bytes)


class RecordReader:
    """Reader of the lines or bytes of one span, on which formats build.

    `at` is the bytes of the span read so far; `empty` is set once a file has been read that decompresses to nothing.
    A document longer than `max_mb` ends the reading even if malformed lines are skipped: skipping it would mean
    decompressing it.

    Args:
        span: the span.
        field: field of a record that holds the document.
        max_mb: limit of a document in MiB, uncompressed.
        any_of_fields: fields that are read where there are any; `field` may then be missing, and a record's value is a
            dict.
        optional_fields: fields that are read beside `field` where there are any; a record's value is then a dict.
        layouts: sets of fields of which a record has to have one in full, or `field`; () if any of `any_of_fields` will
            do.
    """

    def __init__(
        self,
        span: Span,
        field: str,
        max_mb: int = 128,
        any_of_fields: tuple[str, ...] = (),
        optional_fields: tuple[str, ...] = (),
        layouts: tuple[tuple[str, ...], ...] = (),
    ):
        self.span, self.field, self.at, self.empty = span, field, 0, False
        self.any_of_fields, self.optional_fields, self.layouts = any_of_fields, optional_fields, layouts
        self.max_mb, self.max_bytes = max_mb, max_mb * MIB

    def describe_mismatch(self, place: Callable[[], str], record: Mapping[str, Any]) -> str:
        """Return an error message about a record that lacks the field of the document and what may stand in its place.

        "" if it has what is needed.

        Args:
            place: returns file and line of the record, or the file.
            record: fields of the record by name; of a file's columns, examples of their values.
        """
        names = [*record]
        if any(record.keys() >= set(layout) for layout in [[self.field], *(self.layouts or zip(self.any_of_fields))]):
            return ""
        if not self.layouts:
            return describe_missing_field(place(), self.field, names, bool(self.any_of_fields))
        wanted = "; ".join(map(" and ".join, self.layouts))
        if format := _other_format(names):
            advice = f'set format = "{format}" in [data] (--format {format})'
        elif name := next((name for name in names if _holds_messages(record[name])), ""):
            advice = f'set field = "{name}" in [data] (--field {name})'
        elif "text" in names:
            advice = 'set format = "auto" in [data] (--format auto) to learn all of its text'
        else:
            advice = "rename its fields to those of a layout"
        return f"{place()}: has no field {self.field!r}, {_list_fields(names)}, and chats have {wanted}: {advice}"

    def read_all(self) -> bytes:
        """Return all bytes of the span's file, decompressed, and set `at`, and `empty` if there are none.

        Raises:
            ConfigError: there are more than the limit of a document.
        """
        with open_decompressed(self.span.file) as (stream, _):
            data = stream.read(self.max_bytes + 1)
        if len(data) > self.max_bytes:
            raise self.too_long(self.span.file, "the text")
        self.at, self.empty = self.span.bytes, not data
        return data

    def lines(self) -> Iterator[tuple[Callable[[], str], bytes]]:
        """Yield (place, line) for each line that begins in the span, decompressed; `place()` returns FILE:LINE.

        Lines have their line ends. Of a compressed file all lines are in the span.

        Raises:
            ConfigError: a line is longer than the limit of a document.
        """
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

    def too_long(self, place: str, subject: str) -> ConfigError:
        """Return the error about a document at `place` that exceeds the size limit.

        `subject` names what is too long, such as "the line".
        """
        return ConfigError(
            f"{place}: {subject} has more than {self.max_mb} MiB unpacked, the limit for a document "
            "(max_document_mb): raise that, or leave it out"
        )

    def _line(self, stream: io.BufferedIOBase, where: Callable[[], str]) -> bytes:
        line = stream.readline(self.max_bytes + 1)
        if len(line) > self.max_bytes:
            raise self.too_long(where(), "the line")
        return line


def _line_number(file: str, start: int, number: int) -> str:
    """Return FILE:LINE of the `number`th line that begins at byte `start` or later, by counting the lines before it."""
    before = 0
    if start:
        with open_url(file) if is_url(file) else open(file, "rb") as stream:
            while start and (block := stream.read(min(start, 1 << 24))):
                before, start = before + block.count(b"\n"), start - len(block)
    return f"{file}:{before + number}"


def decode_line(line: bytes, where: Callable[[], str]) -> str | BadRecord:
    """Return a line's text without its line end, or a `BadRecord` if it is not UTF-8."""
    try:
        return line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(f"{where()}: byte {error.start} of the line is not UTF-8 ({error.reason})")


def describe_missing_field(place: str, field: str, names: list[str], alternatives: bool = False) -> str:
    """Return an error message about a record without the field of the document, with advice by the fields that it has.

    `names` are these fields; `alternatives` says whether the format reads other fields too, none of which it has.
    """
    others = " or others that the format reads" * alternatives
    missing = f"{place}: has no field {field!r}{others}, {_list_fields(names)}"
    if format := _other_format(names):
        return f"{missing}: read it with --format {format} (data.format)"
    what = "text" if field == "text" else "messages" if field == "messages" else "it"
    return f"{missing}: name the one that holds {what} with --field (data.field, or data.fields for each path)"


def _other_format(names: Iterable[str]) -> str:
    """Return the name of the first format of OTHER_FORMATS that reads records with these fields; "" if none does."""
    fits = (format for format, layouts in OTHER_FORMATS.items() if any(set(layout) <= {*names} for layout in layouts))
    return next(fits, "")


def _list_fields(names: Iterable[str]) -> str:
    return f"it has {', '.join(map(repr, islice(names, 12))) or 'none'}"


def _holds_messages(value: Any) -> bool:
    """Return whether a field's value is a list of messages, or such a list as JSON text."""
    if isinstance(value, str):
        return value.lstrip().startswith("[") and any(f'"{key}"' in value for key in ("role", "from"))
    return isinstance(value, list) and any(isinstance(item, dict) and item.keys() & {"role", "from"} for item in value)


def json_type_name(value: Any) -> str:
    """Return the JSON name of a value's type with its article, such as "a list", for messages."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


@contextmanager
def file_errors(file: str) -> Iterator[None]:
    """Turn errors while reading a file in this context into a ConfigError that names the file.

    These are errors of the system, of decompression and of Parquet, and of a URL any; others pass.
    """
    try:
        yield
    except ConfigError:
        raise
    except EOFError:
        raise ConfigError(f"{file} ends in the middle of compressed data: copy the full file again") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply to be read: flatten the records") from None
    except Exception as error:
        module = type(error).__module__.partition(".")[0]
        if isinstance(error, (OSError, zlib.error)) or module in ("zstandard", "compression", "pyarrow", "_zstd"):
            why = f"cannot be read: {' '.join(str(error).split())}: check the permissions, or copy the file again"
            raise ConfigError(f"{file} {why}") from None
        if not is_url(file):
            raise
        with url_errors(file):
            raise
