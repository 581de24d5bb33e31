"""The number of ranks of the whole world that a command line is about."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from titanmoe.config.load import ConfigError, load, peek, prints, recipe_of
from titanmoe.config.parts import Parts
from titanmoe.config.recipe import read_recipe
from titanmoe.config.recipes import find_recipe

_COMMENT = re.compile(r"# world = ([1-9]\d{0,6})")


def recipe_ranks(argv: Sequence[str], parts: Parts) -> int:
    """job.ranks of a recipe and its overrides, 0 if they do not say; raises ConfigError if only a comment says it."""
    config, problem = peek(argv, parts)
    if config is None:
        raise problem
    recipe = recipe_of(argv)
    if recipe and not config.job.ranks:
        file = read_recipe(str(find_recipe(recipe)))
        if comment := _COMMENT.fullmatch(file.text.partition("\n")[0].rstrip()):
            table = f"below [job] in line {file.lines['job']}" if "job" in file.lines else "below a line [job]"
            raise ConfigError(
                [
                    f"{file.name}:1: the comment {comment[0]} does not say the number of ranks any more: "
                    f"write ranks = {comment[1]} {table}, or give --ranks N"
                ]
            )
    return config.job.ranks


def world_of(ranks: int | None, argv: Sequence[str], parts: Parts) -> int:
    """--ranks N if given, else the recipe's own number; ConfigError if neither says it. --print-config needs none."""
    if prints(argv):
        load([*argv, *(["--job.ranks", str(ranks)] if ranks else [])], parts, lambda config: [])  # and exits
    if ranks is None:
        ranks = recipe_ranks(argv, parts) if argv else 0
        if not ranks:
            problem = peek(argv, parts)[1] if argv else None
            ask = "on how many ranks? Give --ranks N, or write it into the recipe: ranks = N below [job]"
            raise ConfigError([*(problem.problems if problem else []), ask], problem.source if problem else "")
    if ranks < 1:
        raise ConfigError([f"--ranks = {ranks} is not a number of ranks: use 1 or more"])
    return ranks


def add_ranks(command: argparse.ArgumentParser) -> None:
    """The arguments that all commands on a recipe share; the recipe itself and its overrides are the loader's."""
    command.usage = f"{command.prog} RECIPE [--ranks N] [options] [--TABLE.FIELD VALUE ...]"
    command.epilog = "RECIPE is a file, or the name of a recipe that comes with titanmoe, such as debug."
    command.allow_abbrev = False  # an unknown option is for the loader to refuse
    command.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of all nodes together (default: the recipe's own, job.ranks)"
    )
    command.set_defaults(overrides=[])
