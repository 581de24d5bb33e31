"""The world size that a command line is about: --ranks N, else the recipe's job.ranks.

Used by train, plan, rehearse, fold and score.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from titanmoe.config.command_line import split_words
from titanmoe.config.component_kinds import Components
from titanmoe.config.load import ConfigError, Draft, load, read_draft

_COMMENT = re.compile(r"# world = ([1-9]\d{0,6})")


def recipe_ranks(draft: Draft) -> int:
    """Return job.ranks as the recipe or an override sets it; 0 if neither does. The caller has looked for --ranks.

    Raises:
        ConfigError: if the recipe cannot be read, or has the number only in an old comment "# world = N".
    """
    if draft.config is None:
        raise draft.error()
    recipe, ranks = draft.settings.recipe, draft.config.job.ranks
    if recipe and not ranks and (comment := _COMMENT.fullmatch(recipe.text.partition("\n")[0].rstrip())):
        table = f"below [job] in line {recipe.lines['job']}" if "job" in recipe.lines else "below a line [job]"
        raise ConfigError(
            f"{recipe.name}:1: the comment {comment[0]} does not say the number of ranks any more: "
            f"write ranks = {comment[1]} {table}, or give --ranks N"
        )
    return ranks


def world_of(ranks: int | None, argv: Sequence[str], components: Components) -> int:
    """Return the number of ranks that a command is about: `ranks` if given, else the recipe's job.ranks.

    With --print-config, prints the recipe, not checked against a mapping, and exits.

    Args:
        ranks: the value of --ranks; None if it is not given.
        argv: the command line's recipe and overrides.

    Raises:
        ConfigError: if neither gives a number of ranks, it is below 1, or the recipe, if needed, cannot be read.
    """
    if split_words(argv).print_config:
        argv = [*argv, *(["--job.ranks", str(ranks)] if ranks else [])]
        load(argv, components, lambda config: [])  # exits
    if ranks is None:
        draft = read_draft(argv, components)
        ranks = recipe_ranks(draft)
        if not ranks:
            raise draft.error("on how many ranks? Give --ranks N, or write it into the recipe: ranks = N below [job]")
    if ranks < 1:
        raise ConfigError(f"--ranks = {ranks} is not a number of ranks: use 1 or more")
    return ranks


def add_ranks(command: argparse.ArgumentParser) -> None:
    """Add --ranks and the usage text to the parser of a command on a recipe.

    Use `parse_known_args`: it leaves the recipe and its overrides, for `titanmoe.config.load`.
    """
    command.usage = f"{command.prog} RECIPE [--ranks N] [options] [--TABLE.FIELD VALUE ...]"
    command.epilog = "RECIPE is a file, or the name of a recipe that comes with titanmoe, such as debug."
    command.allow_abbrev = False  # an unknown option is for the loader to refuse
    command.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of all nodes together (default: the recipe's own, job.ranks)"
    )
    command.set_defaults(overrides=[])
