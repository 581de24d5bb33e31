"""The formats of data, and the table of their names. Neither torch nor NumPy here."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from titanmoe.config import ConfigError
from titanmoe.config.parts import Kind, PartError
from titanmoe.data.formats.format import FormatRules

FORMATS = Kind(
    "data.format",
    {
        "auto": "titanmoe.data.formats.auto:FORMAT",
        "text": "titanmoe.data.formats.text:FORMAT",
        "jsonl": "titanmoe.data.formats.jsonl:FORMAT",
        "parquet": "titanmoe.data.formats.parquet:FORMAT",
        "chat": "titanmoe.data.formats.chat:FORMAT",
        "tokens": "titanmoe.data.formats.tokens:FORMAT",
    },
    FormatRules,
)


@cache
def format_of(extension: str) -> str:
    """The name of the format that files with this extension have under `auto`."""
    try:
        formats = {name: FORMATS.look_up(name) for name in FORMATS.table}
    except PartError as error:
        raise ConfigError([str(error)]) from None
    fits = (name for name, format in formats.items() if extension in format.extensions and not format.conversations)
    return next(fits, "text")


def format_option(conversations: bool) -> Kind:
    """The values of a command's option --format: all formats but token shards, and conversations only if asked for."""
    table = dict(FORMATS.table)
    for name in FORMATS.table:
        with suppress(PartError):  # reported if the user names this format
            format = FORMATS.look_up(name)
            if format.tokenized or (format.conversations and not conversations):
                del table[name]
    return Kind("--format", table, FormatRules)
