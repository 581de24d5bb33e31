"""The command `titanmoe report`, which draws runs into one HTML page.

Called by titanmoe.cli. titanmoe.report.read_run reads the runs, titanmoe.report.page writes the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanmoe.config import ConfigError
from titanmoe.config.allowed_code import add_allow_code
from titanmoe.report.draw import MOST_RUNS


def add_report(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `report` and its options to the parser of `titanmoe`."""
    report = commands.add_parser(
        "report",
        help="draw one run or several into an HTML page",
        description="Draws loss, speed, times, experts' load, events, mapping and config of runs into one HTML page "
        "that needs no network. A run that is still going can be drawn too.",
    )
    report.add_argument("RUN", type=Path, nargs="+", help="folder of a run, such as runs/debug")
    report.add_argument("--out", type=Path, metavar="FOLDER", help="default: report/ in the first run's folder")
    add_allow_code(report)
    report.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Run `titanmoe report`: write the HTML page of some runs and print its path; return 0, or 2 after an error."""
    from titanmoe.report.page import write_page
    from titanmoe.report.read_run import read_runs

    if len(args.RUN) > MOST_RUNS:
        problem = f"{len(args.RUN)} runs are too many for distinct colours: name {MOST_RUNS} or fewer"
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        file = write_page(runs := read_runs(args.RUN), args.out)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write to {error.filename or args.out}: {error.strerror}", file=sys.stderr)
        return 2
    for line in (line for run in runs for line in run.warnings):
        print(f"warning: {line}", file=sys.stderr)
    print(file)
    return 0
