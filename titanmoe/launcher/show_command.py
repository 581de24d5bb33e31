"""`titanmoe data show`: samples of a recipe as they will be trained on, and the lengths of its documents.

Called by titanmoe.cli. The recipe's loader gives the first samples, which do not depend on the ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.schema import Config
from titanmoe.text_report import Report, print_report


def add_show(data_commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `show` to those of `titanmoe data`."""
    show = data_commands.add_parser(
        "show",
        help="print samples as they will be trained on, and the lengths of documents",
        description="Prints the first samples of a recipe as the loader gives them to the model: tokens with ids, "
        "those that are learned in green (in [...] where the output is no terminal), documents, positions and padding. "
        "Then the lengths of the documents: how many fit training.seq_len, and which seq_len would keep most of them. "
        "Data that is not tokenized yet is tokenized into data.cache, as a run does.",
        allow_abbrev=False,
    )
    show.usage = f"{show.prog} RECIPE [--sample N] [--TABLE.FIELD VALUE ...]"
    show.epilog = "RECIPE is a file, or the name of a recipe that comes with titanmoe, such as debug."
    show.add_argument("--sample", type=int, default=1, metavar="N", help="number of samples to print (default 1)")
    show.set_defaults(run=run_show, overrides=[])


def run_show(args: argparse.Namespace) -> int:
    """Run `titanmoe data show`: print the report, or what is wrong; return 0, or 2 if the request is refused.

    `args` has `sample`, the number of samples, and `overrides`, the words of the recipe and its overrides.
    """
    problems = [] if args.sample > 0 else [f"--sample = {args.sample} is not a number of samples: use 1 or more"]
    if not args.overrides:
        problems.append("command line: which recipe? For example: titanmoe data show sft_debug")

    def report() -> Report:
        from titanmoe.data.check_data import check_data

        config = load(args.overrides, COMPONENTS, lambda config: [])
        check_data(config)
        # The samples of a run depend neither on its ranks nor on its microbatches.
        batch = max(1, config.training.global_batch_size)
        config = replace(config, training=replace(config.training, local_batch_size=1, global_batch_size=batch))
        return list(_describe(config, args.sample)), {}, 0

    return print_report(problems, report)


def _describe(config: Config, count: int) -> Iterator[str]:
    """Yield the lines of `titanmoe data show`: samples, what the chat template writes, lengths of each source.

    `count` samples are shown, from the run's first on. `config` must have local_batch_size 1 and a global batch size.
    """
    from titanmoe.data.describe_samples import (
        BRACKETS,
        GREEN,
        describe_sample,
        escape,
        explain_marks,
        find_places,
        open_stored_tokenizer,
    )
    from titanmoe.data.documents import is_masked
    from titanmoe.data.lengths import describe_lengths
    from titanmoe.data.loader import Loader

    loader, marks = Loader(config, 0, 1), GREEN if sys.stdout.isatty() else BRACKETS
    mix, tokenizer = loader.mix, open_stored_tokenizer(loader.mix.tokenizer)
    yield explain_marks(marks)
    samples = [sample for sample in mix.take(0, count) if sample]
    batch = loader.layout.read(mix, samples)
    for n, sample in enumerate(samples):
        first, *lines = describe_sample(batch, n, tokenizer, marks, find_places(mix, sample))
        yield from ("", f"sample {n} of the run, from {mix.sources[sample.source].name}: {first}", *lines)
    sources = [source for source in mix.sources if hasattr(source.packer, "documents")]
    if tokenizer and any(is_masked(source.packer.documents) for source in sources):
        from titanmoe.data.chat import open_chat_encoder

        with suppress(ConfigError):  # preferences in plain text have no template
            additions = open_chat_encoder(config.data.chat_template, tokenizer).describe_additions()
            yield from ("", "the chat template writes, around what the data has (...):")
            yield from (f"    {role:<9}  {escape(text)}" for role, text in additions.items())
    for source in sources:
        yield from ("", f"{source.name}: {source.description}", *describe_lengths(source.packer))
