"""Conversations in JSONL or Parquet: a list of messages in a field of each line or row."""

from titanmoe.data.formats import jsonl, parquet
from titanmoe.data.formats.format import FormatRules


class Conversations(FormatRules):
    help = "chat: JSONL or Parquet with messages, loss only on the assistant's."
    field = "messages"
    conversations = True
    beside = ("tools",)

    def takes(self, extension: str) -> bool:
        return extension in (*jsonl.FORMAT.extensions, *parquet.FORMAT.extensions)

    def file_format(self, extension: str) -> str:
        return "parquet" if extension in parquet.FORMAT.extensions else "jsonl"


FORMAT = Conversations()
