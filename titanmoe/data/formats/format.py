"""The interface of a data format: which files it reads, how processes share them, and the records in them.

Called by tokenization, which chooses one by name or by extension. docs/extending.md shows how to add one.
"""

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
    """Properties of a data format, with their defaults."""

    extensions: tuple[str, ...] = ()
    """Extensions of its files, in lower case, without that of a compression.

    "auto" chooses formats by them, and of a folder only such files are read; all files if empty."""
    by_line = False
    """Whether a line can be read without those before it, so that several processes can share a large file."""
    field = "text"
    """Field of a record that holds the document, unless the user names another."""
    conversations = False
    """Whether a record's value is a list of messages, which a chat template turns into text, with loss only on what the
    assistant says. "auto" never chooses such a format."""
    optional_fields: tuple[str, ...] = ()
    """Fields of a record that are read beside `field` where there are any. A record's value is then a dict of all."""
    alternative_fields: tuple[str, ...] = ()
    """Fields of a record of which any may take the place of `field`. A record's value is then a dict."""
    layouts: tuple[tuple[str, ...], ...] = ()
    """Sets of fields of which a record has to have one in full, or `field`; () if any of `alternative_fields` will
    do."""
    completions_per_prompt = 1
    """2 if a record is a preference pair (titanmoe.data.preferences); its value is then the whole record."""
    tokenized = False
    """Whether its files are token shards, which need no tokenization."""

    def preset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults of other options by name: best-fit packing for chats and preferences; {} for other data.

        Token shards with a label mask count as chats, whatever the format. `values` has the options so far by name.
        """
        is_chat = values["data.source"] == "files" and (
            self.conversations or self.completions_per_prompt > 1 or any(map(_has_chats, values["data.paths"]))
        )
        return {"data.packing": "best_fit"} if is_chat else {}

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield a contradiction if data.chat_template is set and neither the format nor rl.reward reads chats."""
        data = config.data
        reads_chats = self.conversations or self.completions_per_prompt > 1 or config.rl.reward
        if data.chat_template and not reads_chats:
            yield Violation(
                ("data.chat_template", "data.format"),
                f'data.chat_template = "{data.chat_template}" is for chats, and data.format = "{data.format}" reads '
                'none: set format = "chat", or chat_template = ""',
            )

    def accepts(self, extension: str) -> bool:
        """Return whether a folder's files with this extension, like ".jsonl", are read; True without `extensions`."""
        return not self.extensions or extension in self.extensions

    def file_format(self, extension: str) -> str:
        """Return the name of the format that parses files with this extension, as "jsonl"; "" for this one, as here."""
        return ""

    def spans(self, source: InputFile, size: int) -> Iterator[Span]:
        """Yield independent spans of a file in order, of `size` bytes or less; one if the file cannot be divided.

        Here only files that are not compressed are divided, at any byte, and only by a format with `by_line`.
        """
        if self.by_line and not source.compressed:
            for start in range(0, source.bytes, size):
                stop = min(start + size, source.bytes)
                yield source.span(start, stop, stop - start)
        else:
            yield source.span(0, source.bytes, source.bytes)


class Format(FormatSpec):
    """A format that reads records from files."""

    @abstractmethod
    def read(self, reader: RecordReader) -> Iterator[Record | BadRecord]:
        """Yield the records of the reader's span in order, and a `BadRecord` for each malformed one."""
        raise NotImplementedError


def _has_chats(path: str) -> bool:
    """Return whether a path is a folder of token shards in which only some tokens count in the loss."""
    return manifest_of(path).get("counted") is not None


def completions_in_manifest(manifest: Mapping[str, Any]) -> int:
    """Return `completions_per_prompt` in a manifest of token shards, "answers" in older ones; 1 without either."""
    return manifest.get("completions_per_prompt", manifest.get("answers", 1))


def manifest_of(path: str) -> dict[str, Any]:
    """Return the manifest of a folder of token shards; {} for anything else or an unreadable one."""
    try:
        manifest = parse_json(Path(path).expanduser().joinpath("manifest.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}
