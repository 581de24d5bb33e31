"""What a data format is: which files it is for, how they are divided among processes, and how they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titanmoe.config.component_kinds import Spec
from titanmoe.config.parse_json import parse_json
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config
from titanmoe.data.record_reader import BadRecord, InputFile, Record, RecordReader, Span


class FormatSpec(Spec):
    """The facts about a format, with their usual values."""

    extensions: tuple[str, ...] = ()
    """Extensions of its files, in lower case, without that of a compression. `auto` goes by them, and only such files
    of a folder are read; if there are none here, all files are."""
    by_line = False
    """Whether a line can be read without those before it, so that several processes share a large file."""
    field = "text"
    """The field of a record that holds the document, unless the recipe names another."""
    conversations = False
    """Whether a record's value is the messages of a chat, which a template makes into text, with loss only on what the
    assistant said. `auto` chooses no such format."""
    optional_fields: tuple[str, ...] = ()
    """Fields of a record that are read beside `field`, where there are any; its value is then all of them by name."""
    completions_per_prompt = 1
    """2: a record is a pair of answers, and its value the whole record (titanmoe.data.preferences)."""
    tokenized = False
    """Whether its files are token shards, which are used as they are."""

    def preset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Conversations stay whole and apart."""
        is_chat = values["data.source"] == "files" and (
            self.conversations or self.completions_per_prompt > 1 or any(map(_has_chats, values["data.paths"]))
        )
        return {"data.packing": "best_fit"} if is_chat else {}

    def contradictions(self, config: Config) -> Iterator[Violation]:
        data = config.data
        if data.chat_template and not (self.conversations or self.completions_per_prompt > 1):
            yield Violation(
                ("data.chat_template", "data.format"),
                f'data.chat_template = "{data.chat_template}" is for chats, and data.format = "{data.format}" reads '
                'none: set format = "chat", or chat_template = ""',
            )

    def accepts(self, extension: str) -> bool:
        """Whether files of a folder with this extension are read: data sets come with README files and the like."""
        return not self.extensions or extension in self.extensions

    def file_format(self, extension: str) -> str:
        """The name of the format that reads files with this extension; "" for this one."""
        return ""

    def spans(self, source: InputFile, size: int) -> Iterator[Span]:
        """Divides the file into spans of about `size` bytes, if it can be read from the middle; else one span."""
        if self.by_line and not source.compressed:
            for start in range(0, source.bytes, size):
                stop = min(start + size, source.bytes)
                yield source.span(start, stop, stop - start)
        else:
            yield source.span(0, source.bytes, source.bytes)


class Format(FormatSpec):
    """A format that reads files."""

    @abstractmethod
    def read(self, reader: RecordReader) -> Iterator[Record | BadRecord]:
        """The documents of a span, in order, and a `BadRecord` for whatever is not one."""
        raise NotImplementedError


def _has_chats(path: str) -> bool:
    """Whether it is a folder of token shards that say which tokens count (titanmoe.data.token_shards)."""
    return manifest_of(path).get("counted") is not None


def manifest_of(path: str) -> dict[str, Any]:
    """Of a folder of token shards; {} of whatever else it is, of which the run says more when it opens it."""
    try:
        manifest = parse_json(Path(path).expanduser().joinpath("manifest.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}
