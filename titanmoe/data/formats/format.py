"""What a data format is: which files it is for, how they are divided and read."""

from __future__ import annotations

from collections.abc import Iterator

from titanmoe.config.parts import Rules
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config
from titanmoe.data.reader import Bad, InputFile, Reader, Record, Span


class Format(Rules):
    """These are the usual answers; a format that reads files adds `read`."""

    extensions: tuple[str, ...] = ()
    """Of its files, in lower case, without that of a compression: `auto` knows them by these, and of a folder no
    others are read. Without any, every file of a folder is."""
    by_line = False
    """Whether a line can be read without those before it, so that several processes share a large file."""
    field = "text"
    """Of a record, unless the recipe names one."""
    conversations = False
    """Whether a record's value is the messages of a chat, which a template makes into text, with loss only on what the
    assistant said. `auto` chooses no such format."""
    tokenized = False
    """Whether its files are token shards, in which there is nothing to read."""

    def contradictions(self, config: Config) -> Iterator[Violation]:
        data = config.data
        if data.chat_template and not self.conversations:
            yield Violation(
                ("data.chat_template", "data.format"),
                f'data.chat_template = "{data.chat_template}" is for chats, and data.format = "{data.format}" reads '
                'none: set format = "chat", or chat_template = ""',
            )

    def takes(self, extension: str) -> bool:
        """Whether such a file of a folder is read: data sets come with pages about themselves."""
        return not self.extensions or extension in self.extensions

    def file_format(self, extension: str) -> str:
        """The name of the format that reads such a file; "" for this one."""
        return ""

    def spans(self, source: InputFile, size: int) -> Iterator[Span]:
        """The file in parts of about `size` bytes, as far as it can be entered in the middle."""
        if self.by_line and not source.compressed:
            for start in range(0, source.bytes, size):
                stop = min(start + size, source.bytes)
                yield source.span(start, stop, stop - start)
        else:
            yield source.span(0, source.bytes, source.bytes)

    def read(self, reader: Reader) -> Iterator[Record | Bad]:
        """The documents of a span, in their order, and what is no document."""
        raise NotImplementedError(f"{type(self).__name__} has no method `read`")
