"""`titanmoe rehearse`: what a rank of a world would send and keep, before there is a world."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from titanmoe.config import ConfigError
from titanmoe.config.load import format_problems


def add_rehearse(commands: argparse._SubParsersAction) -> None:
    rehearse = commands.add_parser(
        "rehearse",
        help="one step of any rank of any world, in one process and without GPUs",
        description="Runs the step of a recipe as one rank of a world would, on tensors that have shapes but no "
        "memory, and tells every message, what it weighs and which line asks for it. Opens no data, tokenizer or "
        "checkpoint. Whatever follows the options and has the form --table.field value overrides the recipe.",
    )
    rehearse.add_argument("--config", metavar="FILE", required=True, help="a recipe")
    rehearse.add_argument("--world", type=int, metavar="N", required=True, help="ranks in all")
    rehearse.add_argument("--rank", type=int, metavar="N", default=0, help="which of them (default 0)")
    rehearse.add_argument(
        "--all-roles", action="store_true", help="one rank of each pipeline stage, and whether their messages can pass"
    )
    rehearse.add_argument("--hardware", metavar="NAME", default="h100", help="whose ways are taken (default h100)")
    rehearse.add_argument("--node", type=int, metavar="N", default=8, help="ranks of a node (default 8)")
    rehearse.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        default=1.0,
        help="rows of the busiest expert over the mean (default 1: balanced)",
    )
    rehearse.add_argument("--json", type=Path, metavar="FILE", help="write all of it there too")
    rehearse.add_argument("--picture", type=Path, metavar="FILE", help="draw memory over the step there, as HTML")
    rehearse.set_defaults(run=run_rehearse, overrides=[])


def run_rehearse(args: argparse.Namespace) -> int:
    from titanmoe.rehearse.hardware import HARDWARE

    problems = _problems(args, list(HARDWARE))
    if problems:
        print(format_problems(problems), file=sys.stderr)
        return 2
    from titanmoe.rehearse.picture import picture
    from titanmoe.rehearse.roles import check_roles, roles
    from titanmoe.rehearse.table import as_json, table, table_of_roles
    from titanmoe.rehearse.world import read, rehearse

    try:
        config = read(["--config", args.config, *args.overrides], args.world, args.hardware, args.node)
        if args.all_roles:
            found = list(roles(config, args.world, args.hardware, args.imbalance, args.node))
        else:
            found = [rehearse(config, args.world, args.rank, args.hardware, args.imbalance, args.node)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    verdict = check_roles(found) if args.all_roles else None
    print("\n".join(table(found[0]) if verdict is None else table_of_roles(found, verdict)))
    pages: dict[Path, str] = {}
    if args.json is not None:
        ranks = [as_json(one) for one in found]
        order = (
            {"order": {"verdict": verdict.text, "safe": verdict.safe, "concerned": verdict.concerned}}
            if verdict
            else {}
        )
        pages[args.json] = json.dumps({"ranks": ranks} | order, indent=1) + "\n"
    if args.picture is not None:
        pages[args.picture] = picture(found)
    for file, text in pages.items():
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"error: cannot write {file}: {error.strerror}", file=sys.stderr)
            return 2
    return 0 if verdict is None or verdict.safe else 1


def _problems(args: argparse.Namespace, names: list[str]) -> list[str]:
    found = []
    if args.hardware not in names:
        found.append(f"--hardware = {args.hardware} is not known: use {', '.join(names)}")
    if args.world < 1:
        found.append(f"--world = {args.world} is not a number of ranks: use 1 or more")
    elif not 0 <= args.rank < args.world:
        found.append(f"--rank = {args.rank} is not in a world of {args.world} ranks: use 0 to {args.world - 1}")
    if args.node < 1:
        found.append(f"--node = {args.node} is not a number of ranks: use 1 or more")
    if not args.imbalance >= 1:
        found.append(f"--imbalance = {args.imbalance:g} is below 1, the mean: use 1 or more")
    return found
