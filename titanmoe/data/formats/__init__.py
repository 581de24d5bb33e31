"""The data formats by name (data.format). Imports neither torch nor NumPy."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from titanmoe.config import ConfigError
from titanmoe.config.component_kinds import ComponentError, ComponentKind
from titanmoe.config.schema import Config
from titanmoe.data.formats.format import FormatSpec, completions_in_manifest, manifest_of


class Auto(FormatSpec):
    """The format "auto": chooses the format of each file by its extension."""

    help = "auto: by extension."

    def file_format(self, extension: str) -> str:
        return format_of_extension(extension)


class TokenShards(FormatSpec):
    """The format "tokens": token shards, as `titanmoe tokenize` writes them (titanmoe.data.token_shards)."""

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
    """Return the name of the data format that "auto" chooses for files with this extension; "text" if none claims it.

    Formats of conversations are never chosen. The extension is in lower case and without that of a compression.

    Raises:
        ConfigError: a format cannot be imported.
    """
    try:
        formats = {name: FORMATS.look_up(name) for name in FORMATS.table}
    except ComponentError as error:
        raise ConfigError(str(error)) from None
    fits = (name for name, format in formats.items() if extension in format.extensions and not format.conversations)
    return next(fits, "text")


def completions_in(path: str, config: Config) -> int:
    """Return 2 if `path`, an entry of data.paths, holds preference pairs, else 1.

    The manifest says so for token shards, and data.format for other entries. 1 also if the format is unknown.
    """
    try:
        if manifest := manifest_of(path):
            return completions_in_manifest(manifest)
        return FORMATS.look_up(config.data.format).completions_per_prompt
    except ComponentError:  # another check reports it
        return 1


def format_option(conversations: bool) -> ComponentKind[FormatSpec]:
    """Return the allowed values of a command's option --format: all formats but token shards.

    `conversations` says whether to include formats of conversations and preference pairs. A format that cannot be
    imported is included.
    """
    table = dict(FORMATS.table)
    for name in FORMATS.table:
        with suppress(ComponentError):  # reported if the user names this format
            format = FORMATS.look_up(name)
            if format.tokenized or ((format.conversations or format.completions_per_prompt > 1) and not conversations):
                del table[name]
    return ComponentKind("--format", table, FormatSpec)
