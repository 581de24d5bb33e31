"""The formats of data, and the table of their names. Neither torch nor NumPy here."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from titanmoe.config import ConfigError
from titanmoe.config.component_kinds import ComponentError, ComponentKind
from titanmoe.config.schema import Config
from titanmoe.data.formats.format import FormatSpec, manifest_of


class Auto(FormatSpec):
    """The format of each file by its extension."""

    help = "auto: by extension."

    def file_format(self, extension: str) -> str:
        return format_of_extension(extension)


class TokenShards(FormatSpec):
    """What `titanmoe tokenize` makes (titanmoe.data.token_shards)."""

    help = "tokens: token shards alone."
    tokenized = True


FORMATS = ComponentKind(
    "data.format",
    {
        "auto": Auto(),
        "text": "titanmoe.data.formats.text:FORMAT",
        "jsonl": "titanmoe.data.formats.jsonl:FORMAT",
        "parquet": "titanmoe.data.formats.parquet:FORMAT",
        "chat": "titanmoe.data.formats.conversations:CHAT",
        "preference": "titanmoe.data.formats.conversations:PREFERENCE",
        "tokens": TokenShards(),
    },
    FormatSpec,
)


@cache
def format_of_extension(extension: str) -> str:
    """The name of the format that files with this extension have under `auto`."""
    try:
        formats = {name: FORMATS.look_up(name) for name in FORMATS.table}
    except ComponentError as error:
        raise ConfigError([str(error)]) from None
    fits = (name for name, format in formats.items() if extension in format.extensions and not format.conversations)
    return next(fits, "text")


def completions_in(path: str, config: Config) -> int:
    """2 if what data.paths calls so are pairs of answers, as far as its name and a manifest tell."""
    try:
        return (
            manifest_of(path).get("answers", 1)
            if manifest_of(path)
            else FORMATS.look_up(config.data.format).completions_per_prompt
        )
    except ComponentError:  # reported as such
        return 1


def format_option(conversations: bool) -> ComponentKind:
    """The values of a command's option --format: all formats but token shards. conversations: those that a chat
    template makes text of, too."""
    table = dict(FORMATS.table)
    for name in FORMATS.table:
        with suppress(ComponentError):  # reported if the user names this format
            format = FORMATS.look_up(name)
            if format.tokenized or ((format.conversations or format.completions_per_prompt > 1) and not conversations):
                del table[name]
    return ComponentKind("--format", table, FormatSpec)
