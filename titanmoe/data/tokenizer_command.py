"""The command `titanmoe tokenizer train`: a byte-level BPE of the user's text, with tokens for the roles of a chat.

Called by titanmoe.cli. The package tokenizers trains; `titanmoe tokenize` and transformers read the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from titanmoe.config.component_kinds import ComponentError
from titanmoe.config.load import ConfigError, format_problems
from titanmoe.data.formats import format_option
from titanmoe.data.read_files import find_files, read_records, split_spans
from titanmoe.data.record_reader import BadRecord, RecordReader
from titanmoe.data.tokenize_command import add_format
from titanmoe.data.tokenize_unit import texts_only
from titanmoe.data.tokenizer import CHAT_TEMPLATE, FILE, SETTINGS

END = "<|endoftext|>"
MARKS = (END, "<|system|>", "<|user|>", "<|assistant|>")
LEAST = 256 + len(MARKS)
TEMPLATE = """\
{%- for message in messages -%}
    {{- "<|" + message.role + "|>" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""
"""Chat template of the tokenizer. Labels are the assistant's messages, each with the EOS that ends it."""


def add_tokenizer(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `tokenizer` with its own subcommand `train`, which requires nothing until it runs."""
    parser = commands.add_parser("tokenizer", help="train a tokenizer on your own text")
    train = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "train",
        help="a byte-level BPE from files, folders and globs",
        description="Trains a byte-level BPE, which can write any text, and writes a folder that `titanmoe tokenize "
        "--tokenizer` and transformers read. It has marks for the end of a document and for the roles of a chat.",
    )
    train.set_defaults(run=run_tokenizer)
    train.add_argument("paths", metavar="IN", nargs="*", help="files, folders, globs; .gz and .zst too")
    train.add_argument("--out", metavar="DIR", type=Path, help="the folder to make")
    train.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"tokens in all, above {LEAST}: a few thousand for megabytes of text, 32,000 to 130,000 for gigabytes",
    )
    add_format(train, format_option(conversations=False))
    train.add_argument("--field", default="text", help='the field with the text (default "text")')


def run_tokenizer(args: argparse.Namespace) -> int:
    """Run `titanmoe tokenizer train`; return 0, or 2 after printing problems."""
    try:
        print("\n".join(_train(args)))
        return 0
    except ConfigError as error:
        print(format_problems(error.problems, error.source), file=sys.stderr)
    except OSError as error:
        print(format_problems([f"{error.filename or args.out}: {error.strerror}"]), file=sys.stderr)
    return 2


def _train(args: argparse.Namespace) -> list[str]:
    """Check the options, train the tokenizer and write its folder; return lines to print about it.

    The vocabulary is smaller than --vocab-size if too few pairs of tokens occur twice. A bad record ends the training.

    Raises:
        ConfigError: with every problem of the options, or if the texts cannot be read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    problems, sources = [], []
    if not args.paths:
        problems.append("nothing to read: name files, folders or globs")
    if not args.out:
        problems.append("--out is missing: name the folder to make")
    elif args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        problems.append(f"--out = {args.out} exists already: name a folder that is new or empty")
    if args.vocab_size is None:
        problems.append("--vocab-size is missing: a few thousand for megabytes of text, 32,000 or more for gigabytes")
    elif args.vocab_size <= LEAST:
        problems.append(
            f"--vocab-size = {args.vocab_size} is too small: 256 bytes and {len(MARKS)} marks alone are {LEAST} tokens"
        )
    try:
        format_option(conversations=False).look_up(args.format)
        sources = find_files(args.paths, args.format)
    except ComponentError as error:
        problems.append(str(error))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)

    characters = 0

    def texts() -> Iterator[str]:
        nonlocal characters
        for source in sources:
            for span in split_spans(source, source.bytes):
                for entry in texts_only(read_records(RecordReader(span, args.field)), args.field):
                    if isinstance(entry, BadRecord):
                        raise ConfigError(entry.why)
                    characters += len(entry.value)
                    yield entry.value

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        min_frequency=2,
        special_tokens=list(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    if not characters:
        raise ConfigError(f"there is no text in {', '.join(args.paths)}: a tokenizer is trained on some")
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (args.out / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (args.out / CHAT_TEMPLATE).write_text(TEMPLATE, encoding="utf-8")
    tokenizer.save(str(args.out / FILE))
    size = tokenizer.get_vocab_size()
    files = f"{len(sources)} file{'s' * (len(sources) != 1)}"
    lines = [f"{args.out}: {size:,} tokens, from {files} with {characters:,} characters"]
    if size < args.vocab_size:
        lines.append(
            f"fewer than --vocab-size {args.vocab_size:,}: no other two tokens follow each other twice within a word"
        )
    return lines
