"""The command `titanmoe rehearse`: what any rank would send, compute and hold in memory, before a job is launched.

Called by titanmoe.cli. titanmoe.rehearse.rehearsal runs the step of each rank, titanmoe.rehearse.message_order checks
the messages of several. docs/rehearse.md explains the report.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.config.world_size import add_ranks, world_of
from titanmoe.plan.plan_command import check_imbalance
from titanmoe.text_report import Report, print_report


def add_rehearse(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `rehearse`."""
    rehearse = commands.add_parser(
        "rehearse",
        help="one step of any rank of any world, in one process and without GPUs",
        description="Run one step of a recipe as one rank of a world would, on tensors that have shapes but no "
        "storage, and report every message, its size and the line of code that sends it. No data, tokenizer or "
        "checkpoint is opened. --table.field VALUE overrides a field of the recipe.",
    )
    add_ranks(rehearse)
    rehearse.add_argument("--rank", type=int, metavar="N", default=0, help="the rank to rehearse (default 0)")
    rehearse.add_argument(
        "--all-roles",
        action="store_true",
        help="rehearse the first rank of each pipeline stage and the last along each axis, or all of up to 8, and "
        "check that all messages can complete",
    )
    rehearse.add_argument("--all-ranks", action="store_true", help="rehearse and check every rank")
    rehearse.add_argument(
        "--hardware", metavar="NAME", default="h100", help="run the code that this hardware runs (default h100)"
    )
    rehearse.add_argument(
        "--steps", type=int, metavar="N", default=1, help="run this many steps and report the last one (default 1)"
    )
    rehearse.add_argument("--node", type=int, metavar="N", default=8, help="ranks per node (default 8)")
    rehearse.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        default=1.0,
        help="routed tokens of the busiest expert over the mean (default 1: balanced)",
    )
    rehearse.add_argument(
        "--routing",
        type=Path,
        metavar="FILE",
        help="take the routed tokens of each expert from an experts.jsonl, or from the run folder that holds one; the "
        "results are estimates",
    )
    rehearse.add_argument("--routing-step", type=int, metavar="N", help="the step of that file (default: the last)")
    rehearse.add_argument(
        "--relayout",
        metavar="MAPPING",
        help="instead of a step rehearse a move of the weights to another mapping, on every rank: of a model that "
        'generates ("tp=2 ep=4 dtype=bfloat16") or of one that trains ("parallelism.tp=2")',
    )
    rehearse.add_argument("--json", type=Path, metavar="FILE", help="also write the full report to this file")
    rehearse.set_defaults(run=run_rehearse, overrides=[])


def run_rehearse(args: argparse.Namespace) -> int:
    """Run `titanmoe rehearse`: print the report, and write the file of --json.

    Returns:
        0; 1 if messages cannot complete, which a rehearsal of --rank alone does not check; 2 if the request is refused,
            which is printed.
    """
    from titanmoe.ops.device import HARDWARE

    return print_report(_problems(args, list(HARDWARE)), lambda: _report(args))


def _report(args: argparse.Namespace) -> Report:
    """Rehearse as the options say, and return the lines to print, the files to write, and the exit code.

    Raises:
        ConfigError: the recipe or an option is refused.
    """
    from titanmoe.components import COMPONENTS
    from titanmoe.rehearse.many_ranks import check_ranks, rehearse_ranks
    from titanmoe.rehearse.recorded_routing import recorded_routing
    from titanmoe.rehearse.rehearsal import recipe_to_rehearse
    from titanmoe.rehearse.rehearsal_table import as_json, format_ranks, format_rehearsal

    world = world_of(args.ranks, args.overrides, COMPONENTS)
    if not 0 <= args.rank < world:
        raise ConfigError(f"--rank = {args.rank} is not in a world of {world} ranks: use 0 to {world - 1}")
    config = recipe_to_rehearse(args.overrides, world, args.hardware, args.node)
    if args.relayout is not None:
        return _report_relayout(args, config, world)
    check_imbalance(config, args.imbalance)
    routing = args.imbalance if args.routing is None else recorded_routing(config, args.routing, args.routing_step)
    ranks = range(world) if args.all_ranks else None if args.all_roles else [args.rank]
    options = {"routing": routing, "node": args.node, "ranks": ranks, "steps": args.steps}
    rehearsals = list(rehearse_ranks(config, world, args.hardware, **options))
    if not (args.all_roles or args.all_ranks):
        lines, order, code = format_rehearsal(rehearsals[0]), {}, 0
    else:
        verdict = check_ranks(rehearsals)
        lines, code = format_ranks(rehearsals, verdict), 0 if verdict.safe else 1
        order = {"order": {"verdict": verdict.text, "safe": verdict.safe, "concerned": verdict.details}}
    data = {"ranks": [as_json(rehearsal) for rehearsal in rehearsals]} | order
    return lines, {args.json: json.dumps(data, indent=1) + "\n"}, code


def _report_relayout(args: argparse.Namespace, config: Config, world: int) -> Report:
    """Rehearse a move of the weights from the config's mapping to that of --relayout, and return the report.

    The report is (lines to print, texts by file to write, exit status: 1 if the messages may not complete).

    Args:
        config: the recipe whose mapping the weights have.

    Raises:
        ConfigError: --relayout is refused, or names another model.
    """
    from titanmoe.rehearse.rehearsed_relayout import (
        format_relayout,
        read_destination,
        rehearse_relayout,
        relayout_as_json,
    )

    destination = read_destination(args.relayout, args.overrides, config, world, args.hardware, args.node)
    moves, verdict = rehearse_relayout(config, destination, world, args.hardware)
    lines = format_relayout(config, destination, moves, verdict, args.hardware)
    data = relayout_as_json(moves, verdict)
    return lines, {args.json: json.dumps(data, indent=1) + "\n"}, 0 if verdict.safe else 1


def _problems(args: argparse.Namespace, hardware: list[str]) -> list[str]:
    """Return a message for each option whose value is invalid, [] if none is; `hardware` has the known names.

    The recipe and --rank are checked later.
    """
    problems = []
    if args.hardware not in hardware:
        problems.append(f"--hardware = {args.hardware} is unknown: use {', '.join(hardware)}")
    if args.node < 1:
        problems.append(f"--node = {args.node} is not a number of ranks: use 1 or more")
    if args.steps < 1:
        problems.append(f"--steps = {args.steps} is not a number of steps: use 1 or more")
    if not args.imbalance >= 1:
        problems.append(f"--imbalance = {args.imbalance:g} is below 1, which is balanced: use 1 or more")
    if (args.all_roles or args.all_ranks) and args.hardware == "cpu":
        option = "--all-ranks" if args.all_ranks else "--all-roles"
        problems.append(f"{option} checks NCCL's rules, and CPUs use gloo: name a GPU with --hardware")
    if args.routing is not None and args.imbalance != 1:
        problems.append("--imbalance and --routing both set the routing: use one of them")
    if args.routing is None and args.routing_step is not None:
        problems.append("--routing-step selects a line of a file: name the file with --routing")
    return problems
