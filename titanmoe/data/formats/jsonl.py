"""The format "jsonl": a JSON object per line, with the document in one of its fields.

Named in titanmoe.data.formats, called by titanmoe.data.read_files. Limits keep a line from filling memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from titanmoe.data.formats.format import Format
from titanmoe.data.record_reader import MIB, BadRecord, Record, RecordReader, decode_line, json_type_name

MAX_VALUES = 4_000_000
"""Limit of values in a line: a parsed value takes up to 100 bytes, however short it is in the file."""


class Jsonl(Format):
    help = "jsonl: a document in a field of each line."
    extensions = (".jsonl", ".ndjson", ".json")
    by_line = True

    def read(self, reader: RecordReader) -> Iterator[Record | BadRecord]:
        for where, line in reader.lines():
            if not line.isspace():
                yield _parse_record(line, where, reader)


FORMAT = Jsonl()


def _parse_record(line: bytes, where: Callable[[], str], reader: RecordReader) -> Record | BadRecord:
    field, any_of_fields, optional_fields = reader.field, reader.any_of_fields, reader.optional_fields
    text = decode_line(line, where)
    if isinstance(text, BadRecord):
        return text
    try:
        if len(line) > MAX_VALUES and _count_values(line) > MAX_VALUES:
            return BadRecord(f"{where()}: has more than {MAX_VALUES:,} values, the limit for a line")
        record = json.loads(text)
    except ValueError as error:
        reason = getattr(error, "msg", str(error))
        return BadRecord(f"{where()}: is not JSON ({reason}): JSONL has one whole object per line")
    except RecursionError:
        return BadRecord(_depth_message(where()))
    if not isinstance(record, dict):
        return BadRecord(f"{where()}: is {json_type_name(record)}, not an object: JSONL has one object per line")
    if mismatch := reader.describe_mismatch(where, record):
        return BadRecord(mismatch)
    names = (field, *any_of_fields, *optional_fields) if any_of_fields or optional_fields else ()
    value = {name: record[name] for name in names if name in record} if names else record[field]
    try:
        has_surrogate = "\\u" in text and _has_surrogate(value)
    except RecursionError:
        return BadRecord(_depth_message(where()))
    if has_surrogate:
        return BadRecord(
            f"{where()}: {field!r} holds half a surrogate pair (\\ud800 to \\udfff), which is not a character"
        )
    return Record(where, value)


def _depth_message(where: str) -> str:
    return f"{where}: JSON nested too deeply: no parser accepts a thousand nested lists"


def _count_values(line: bytes) -> int:
    """Return about how many JSON values a line has, by its commas and brackets; stops counting above MAX_VALUES."""
    plain, values, inside = line.replace(b"\\\\", b"").replace(b'\\"', b""), 0, False
    for start in range(0, len(plain), MIB):
        sections = plain[start : start + MIB].split(b'"')
        for section in sections[inside::2]:
            values += 1 + section.count(b",") + section.count(b"[") + section.count(b"{")
        inside ^= len(sections) % 2 == 0
        if values > MAX_VALUES:
            break
    return values


def _has_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
