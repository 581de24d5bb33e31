"""The format "text": a file is a document.

Named in titanmoe.data.formats, called by titanmoe.data.read_files. It is the shortest format.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanmoe.data.formats.format import Format
from titanmoe.data.record_reader import BadRecord, Record, RecordReader


class Text(Format):
    help = "text: a file is a document."

    def read(self, reader: RecordReader) -> Iterator[Record | BadRecord]:
        data, file = reader.read_all(), reader.span.file
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            yield BadRecord(f"{file}:{line}: byte {error.start} is not UTF-8 ({error.reason})")
        else:
            if text:
                yield Record(lambda: file, text)


FORMAT = Text()
