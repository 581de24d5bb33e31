"""The format "parquet": a record per row, with the document in one of its columns.

Named in titanmoe.data.formats, called by titanmoe.data.read_files; needs pyarrow. Processes share a file by row groups,
of which few rows are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.data.formats.format import Format
from titanmoe.data.record_reader import BadRecord, InputFile, Record, RecordReader, Span
from titanmoe.data.remote import is_url, open_url

MAX_ROWS = 256
"""Limit of rows in memory at a time."""
MAX_RATIO = 256
"""Limit of the ratio of uncompressed to compressed bytes of a large row group; text has 3 to 20."""


class Parquet(Format):
    """Reader of Parquet files. A span is row groups [start, stop)."""

    help = "parquet: a document in a field of each row."
    extensions = (".parquet",)

    def spans(self, source: InputFile, size: int) -> Iterator[Span]:
        metadata = _open_parquet(source.file).metadata
        groups = [metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)]
        scale, start = source.bytes / max(sum(groups), 1), 0
        while start < len(groups):
            stop, size_bytes = start + 1, groups[start]
            while stop < len(groups) and (size_bytes + groups[stop]) * scale <= size:
                size_bytes, stop = size_bytes + groups[stop], stop + 1
            yield source.span(start, stop, int(size_bytes * scale))
            start = stop

    def read(self, reader: RecordReader) -> Iterator[Record | BadRecord]:
        span, field = reader.span, reader.field
        file = _open_parquet(span.file)
        names = file.schema_arrow.names
        if mismatch := reader.describe_mismatch(lambda: span.file, _examples(file.schema_arrow)):
            raise ConfigError(mismatch)
        columns = [name for name in names if name in (field, *reader.any_of_fields, *reader.optional_fields)]
        rows = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
        row_number, rows_in_span, rows_done = sum(rows[: span.start]), max(sum(rows[span.start : span.stop]), 1), 0
        for group in range(span.start, span.stop):
            most_rows = _rows_at_once(reader, file, group, columns)
            for batch in file.iter_batches(most_rows, row_groups=[group], columns=columns):
                for n in range(len(batch)):
                    row_number, rows_done = row_number + 1, rows_done + 1
                    reader.at = span.bytes * rows_done // rows_in_span
                    where = partial("{}: row {}".format, span.file, row_number)
                    if batch.nbytes > reader.max_bytes and batch.slice(n, 1).nbytes > reader.max_bytes:
                        raise reader.too_long(where(), " and ".join(map(repr, columns)))
                    row = {name: batch.column(name)[n].as_py() for name in columns}
                    yield Record(where, row if reader.any_of_fields or reader.optional_fields else row[field])


FORMAT = Parquet()


def _open_parquet(file: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{file}: reading Parquet needs the package pyarrow: pip install pyarrow") from None
    return pyarrow.parquet.ParquetFile(open_url(file) if is_url(file) else file)


def _examples(schema: Any) -> dict[str, Any]:
    """Return an example value of each column, by name, to check a record's fields by.

    It is [{field: None, ...}] for a list of structs, such as messages, and None for any other type.
    """
    from pyarrow import types

    def example(kind: Any) -> Any:
        inner = getattr(kind, "value_type", None)
        return [dict.fromkeys(field.name for field in inner)] if inner and types.is_struct(inner) else None

    return {field.name: example(field.type) for field in schema}


def _rows_at_once(reader: RecordReader, file: Any, group: int, columns: list[str]) -> int:
    """Return the number of rows of row group number `group` to read at a time, of the named columns: 1 to MAX_ROWS.

    They fit in memory even if each were as long as the whole row group: with a dictionary one value can fill many rows.

    Raises:
        ConfigError: the row group is large and packed more than MAX_RATIO to 1.
    """
    row_group = file.metadata.row_group(group)
    chunks = [row_group.column(n) for n in range(row_group.num_columns)]
    chunks = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
    uncompressed = sum(chunk.total_uncompressed_size for chunk in chunks)
    compressed = sum(chunk.total_compressed_size for chunk in chunks)
    if uncompressed > reader.max_bytes and uncompressed > MAX_RATIO * compressed:
        raise reader.too_long(
            f"{reader.span.file}: row group {group + 1}",
            f"{reader.field!r}, {compressed:,} bytes packed {MAX_RATIO} to 1,",
        )
    return max(1, min(MAX_ROWS, 2 * reader.max_bytes // max(1, uncompressed)))
