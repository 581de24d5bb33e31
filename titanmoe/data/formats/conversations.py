"""The formats "chat" and "preference": JSONL or Parquet with messages in a field of each line or row.

Named in titanmoe.data.formats. The files are read as JSONL or Parquet; a format only says which fields have the
messages, and titanmoe.data.chat makes tokens of them.
"""

from titanmoe.data.chat_layouts import CHAT_FIELDS
from titanmoe.data.formats import jsonl, parquet
from titanmoe.data.formats.format import FormatSpec
from titanmoe.data.record_reader import CHAT_LAYOUTS


class Conversations(FormatSpec):
    """The format "chat": messages in each record, in one of the layouts of titanmoe.data.chat_layouts."""

    help = "chat: JSONL or Parquet with messages, ShareGPT's or Alpaca's records, loss only on the assistant's."
    field = "messages"
    conversations = True
    optional_fields = ("tools",)
    alternative_fields = CHAT_FIELDS
    layouts = CHAT_LAYOUTS

    def accepts(self, extension: str) -> bool:
        return extension in (*jsonl.FORMAT.extensions, *parquet.FORMAT.extensions)

    def file_format(self, extension: str) -> str:
        return "parquet" if extension in parquet.FORMAT.extensions else "jsonl"


class Preferences(Conversations):
    """The format "preference": a chosen and a rejected completion per record, in TRL's form."""

    help = "preference: JSONL or Parquet with a prompt, a chosen and a rejected completion, text or messages, for dpo."
    field = "chosen"
    conversations = False
    optional_fields = ()
    layouts = ()
    alternative_fields = ("prompt", "chosen", "rejected", "tools")
    completions_per_prompt = 2


CHAT, PREFERENCE = Conversations(), Preferences()
