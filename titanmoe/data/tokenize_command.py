"""The command `titanmoe tokenize`: its options, their checks, and a summary of what was written.

Called by titanmoe.cli. titanmoe.data.tokenize does the work; runs that tokenize print the same summary.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from titanmoe.config.component_kinds import ComponentError, ComponentKind
from titanmoe.config.load import ConfigError, format_problems
from titanmoe.data.chat_layouts import DESCRIPTIONS
from titanmoe.data.formats import format_option
from titanmoe.data.formats.format import FormatSpec, completions_in_manifest
from titanmoe.this_process import usable_cores

EPILOG = """\
If the command is killed, giving it again resumes from the last finished shard and ends with the same bytes. What is in
the shards depends neither on --workers nor on interruptions. docs/data.md says more.
"""


def add_tokenize(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `tokenize`. Its parser requires nothing: a missing input or --out is refused when it runs."""
    parser = commands.add_parser(
        "tokenize",
        help="text, JSONL, Parquet and chats to token shards",
        description="Makes token shards, which a run reads without any preparation, from files, folders and globs.",
        epilog=EPILOG,
    )
    parser.set_defaults(run=run_tokenize)
    parser.add_argument(
        "paths", metavar="IN", nargs="*", help="files (.gz, .zst too), folders, globs, hf:OWNER/NAME:SPLIT"
    )
    parser.add_argument("--out", metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--tokenizer", metavar="T", default="bytes", help='tokenizer.json or its folder (default "bytes")'
    )
    add_format(parser, format_option(conversations=True))
    parser.add_argument(
        "--field", default="text", help='the field with the text (default "text"; for chats "messages")'
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", default="", help="a Jinja file (default: the tokenizer folder's own)"
    )
    parser.add_argument(
        "--bad-lines", choices=["error", "skip"], default="error", help="skip: leave bad lines out and count them"
    )
    parser.add_argument(
        "--label-weights", action="store_true", help="store how much each label counts, as each message's weight says"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", default=usable_cores(), help="processes (default: one per core)"
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        metavar="N",
        default=1 << 27,
        help="maximum number of tokens in a shard (default 2^27)",
    )
    parser.add_argument(
        "--max-document-mb",
        type=int,
        metavar="N",
        default=128,
        help="maximum MiB, uncompressed, of a text file, a line or a row's value (default 128)",
    )


def add_format(parser: argparse.ArgumentParser, formats: ComponentKind[FormatSpec]) -> None:
    """Add the option --format to a command: a name of these formats or MODULE:NAME, "auto" by default; not checked."""
    names = ",".join([*formats.table, "MODULE:NAME"])
    parser.add_argument("--format", metavar=f"{{{names}}}", default="auto", help=formats.summary())


def run_tokenize(args: argparse.Namespace) -> int:
    """Run `titanmoe tokenize`; return 0, 2 after printing problems, or 130 if it is interrupted."""
    try:
        return _tokenize(args)
    except ConfigError as error:
        print(format_problems(error.problems, error.source), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command resumes from the last finished shard", file=sys.stderr)
        return 130


def _tokenize(args: argparse.Namespace) -> int:
    from titanmoe.data.tokenize import plan_shards, tokenize
    from titanmoe.data.tokenize_unit import TokenizeJob

    problems = []
    if not args.paths:
        problems.append("nothing to tokenize: name files, folders or globs")
    if not args.out:
        problems.append("--out is missing: name the folder to make")
    try:
        format = format_option(conversations=True).look_up(args.format)
        if args.chat_template and not (format.conversations or format.completions_per_prompt > 1):
            problems.append(
                f"--chat-template is for --format chat and preference, and the format is {args.format}: leave one out"
            )
        if args.label_weights and not format.conversations:
            problems.append(
                f"--label-weights is an option of --format chat, and the format is {args.format}: leave one out"
            )
    except ComponentError as error:
        problems.append(str(error))
    for option, value in (
        ("--workers", args.workers),
        ("--shard-tokens", args.shard_tokens),
        ("--max-document-mb", args.max_document_mb),
    ):
        if value < 1:
            problems.append(f"{option} = {value} is out of range: give at least 1")
    if problems:
        raise ConfigError(problems)
    job = TokenizeJob(
        args.paths,
        args.out,
        tokenizer=args.tokenizer,
        format=args.format,
        field=args.field,
        chat_template=args.chat_template,
        bad_lines=args.bad_lines,
        shard_tokens=args.shard_tokens,
        max_document_mb=args.max_document_mb,
        label_weights=args.label_weights,
    )
    plan = plan_shards(job)
    files, size = _count_noun(len(plan.sources), "file"), sum(source.bytes for source in plan.sources)
    print(f"{files}, " + (f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size:,} bytes"))
    for line in summarize(args.out, tokenize(plan, args.workers)):
        print(line)
    return 0


def _count_noun(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"


def describe_layout(manifest: dict[str, Any]) -> str:
    """Return a line about the fields that chats were read from; "" for messages and for other documents."""
    return f"chats from the fields {text}" if (text := DESCRIPTIONS.get(manifest.get("layout", ""))) else ""


def summarize(out: str, manifest: dict[str, Any]) -> list[str]:
    """Return lines to print about finished token shards: tokens, documents, labels, and what was left out.

    `out` is their folder, `manifest` its manifest.
    """
    tokens, assistant_tokens = manifest["tokens"], manifest["counted"]
    has_pairs, count = completions_in_manifest(manifest) > 1, manifest["documents"]
    documents = _count_noun(count // 2, "preference pair") if has_pairs else _count_noun(count, "document")
    lines = [f"{out}: {tokens:,} tokens in {documents} and {_count_noun(len(manifest['shards']), 'shard')}"]
    if assistant_tokens is not None:
        whose = "the completions'" if has_pairs else "the assistant's"
        lines.append(f"{whose}: {assistant_tokens:,} tokens, {assistant_tokens / tokens:.1%}")
    if line := describe_layout(manifest):
        lines.append(line)
    if manifest["empty"]:
        lines.append(f"left out: {manifest['empty']:,} empty documents")
    if manifest["skipped"]:
        lines += [f"left out: {manifest['skipped']:,} bad lines, such as", *(f"  {e}" for e in manifest["examples"])]
    return lines
