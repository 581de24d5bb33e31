"""Makes runs fail in the ways that a cluster fails, and checks that each is named, withstood or made good.

    python -m scripts.torture kills                             # 20 trials, and a table
    python -m scripts.torture hangs --results hangs.jsonl       # the same command again makes only what is missing
    python -m scripts.torture "full disk" --first 17 --trials 1     # repeat one trial, as a failure prints it

A trial trains a small model on 4 CPU ranks. Its seed decides the mapping, what fails and when; one round of a kind's
group is under torchrun, the next under `titanmoe train`. docs/reliability.md has the results. It needs root on Linux,
to mount a file system and to give ranks a network.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from scripts.torture.judge import read, table
from scripts.torture.runs import LAUNCHERS
from scripts.torture.trials import GROUPS, KINDS, trial

PRELOADED = (
    "torch.distributed.run", "torch.distributed.fsdp", "titanmoe.checkpoint.checkpoint_folder", "titanmoe.cli",
    "titanmoe.train.build", "titanmoe.train.trainer", "titanmoe.watch.number_checks", "titanmoe.watch.run_watch",
)  # fmt: skip
"""Modules imported before the first fork, so that no rank has to import them."""


def main() -> int:
    kinds = f"{', '.join(GROUPS)}, or one of: {', '.join(KINDS)}"
    shown = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("python -m scripts.torture", **shown)
    parser.add_argument("kind", choices=[*GROUPS, *KINDS], metavar="KIND", help=kinds)
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="how many (default 20)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the first; each further one adds 1")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="", help="default: both in turns")
    parser.add_argument("--results", metavar="FILE", help="a line per trial; those already in it are not made again")
    args = parser.parse_args()
    if not sys.platform.startswith("linux") or os.geteuid():
        parser.error("this needs root on Linux: it mounts a file system and makes network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the code that unmounts
    for name in PRELOADED:
        importlib.import_module(name)
    some = list(GROUPS[args.kind].kinds) if args.kind in GROUPS else [args.kind]
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        results = Path(args.results or f"{folder}/results")
        outcomes = read(results) if results.exists() else []
        done = {(each.kind, each.seed) for each in outcomes}
        for seed in range(args.first, args.first + args.trials):
            if (kind := some[seed % len(some)], seed) not in done:
                outcomes.append(trial(kind, seed, Path(folder), args.launcher))
                line = json.dumps(asdict(outcomes[-1]))
                print(line, flush=True)
                with results.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    print(f"\n{table(outcomes)}")
    return int(any(each.failure for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
