"""The command `titanmoe data`, and its part `verify`: whether token shards are as they were written.

Called by titanmoe.cli. It reads every byte: shards, their stored scores and the tokenizer.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from titanmoe.config.load import ConfigError, format_problems

EVERY_S = 10
"""Seconds between two lines of progress."""


def add_data(commands: argparse._SubParsersAction) -> argparse._SubParsersAction:
    """Add the subcommand `data` with its own subcommand `verify`; return its subparsers, for further ones."""
    data = commands.add_parser("data", help="show a recipe's samples, or verify token shards")
    data_commands = data.add_subparsers(required=True, metavar="COMMAND")
    verify = data_commands.add_parser(
        "verify",
        help="read every byte of token shards and compare checksums",
        description="Reads every byte of folders of token shards: compares checksums with those of when it was made, "
        "and tokens with the vocabulary. The exit code is 1 if anything has changed.",
    )
    verify.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    verify.set_defaults(run=run_verify)
    return data_commands


def run_verify(args: argparse.Namespace) -> int:
    """Run `titanmoe data verify`; return 0, or 1 if any folder has changed or cannot be read."""
    problems = []
    for folder in args.folders:
        try:
            problems += _verify_folder(folder)
        except ConfigError as error:
            problems += error.problems
        except OSError as error:
            problems.append(f"{error.filename or folder}: {error.strerror}")
    if problems:
        print(format_problems(problems), file=sys.stderr)
    return 1 if problems else 0


def _verify_folder(folder: Path) -> list[str]:
    """Return a message for each shard, stored score or tokenizer file of a folder that has changed.

    Prints a line if none has, and progress on stderr meanwhile.
    """
    from titanmoe.data.token_scores import SCORES, StoredScores
    from titanmoe.data.token_shards import MANIFEST, ShardDocuments, verify

    documents, problems, last_shown = ShardDocuments(folder), [], time.monotonic()
    shards = len(documents.names)
    for number, (_, shard_problems) in enumerate(verify(folder), 1):
        problems += shard_problems
        if time.monotonic() - last_shown > EVERY_S:
            last_shown = time.monotonic()
            print(f"{folder}: {number} of {shards} shards read", file=sys.stderr, flush=True)
    for manifest in sorted((folder / SCORES).glob(f"[!.]*/{MANIFEST}")):
        problems += StoredScores(manifest.parent, documents).find_changed_files()
    try:
        documents.stored_tokenizer.files()
    except ConfigError as error:
        problems += error.problems
    if not problems:
        unchecked = "" if documents.has_sums else "; they are too old to have checksums that a run checks as it reads"
        summary = "1 shard is as it was" if shards == 1 else f"{shards} shards are as they were"
        print(f"{folder}: {summary} written{unchecked}")
    return problems
