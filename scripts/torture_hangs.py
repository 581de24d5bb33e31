#!/usr/bin/env python
"""Makes runs hang in every way a rank can, and checks which rank is named and when all end.

    python scripts/torture_hangs.py                              # 20 trials under torchrun, and a table
    python scripts/torture_hangs.py --launcher "titanmoe train"  # under the other launcher
    python scripts/torture_hangs.py --only stop --first 5 --trials 1       # repeat one, as a failure prints it
    python scripts/torture_hangs.py --out docs/reliability.md    # the table between its marks there

A trial trains a small model on 4 CPU ranks with training.timeout_s = 10. Its seed decides the mapping, the rank that
fails and the moment. The report must name that rank, and be the last thing that the ranks, or titanmoe train, print.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torture_runs import LAUNCHERS, TINY, Run, Wrong, preload, workplace, write

from titanmoe.checkpoint import layout

RANKS, TIMEOUT_S, WITHIN_S = 4, 10, 30.0
LONG = {
    "training.steps": 4000, "training.timeout_s": TIMEOUT_S, "training.global_batch_size": 8,
    "lr_schedule.decay": "none", "checkpoint.enable": "false", "metrics.log_every": 1,
}  # fmt: skip
MAPPINGS: tuple[dict[str, Any], ...] = (
    {"parallelism.experts.ep": 2},
    {"parallelism.tp": 2, "parallelism.experts.ep": 4},
    {"parallelism.cp": 2, "parallelism.experts.ep": 2},
    {"parallelism.pp": 2, "parallelism.experts.ep": 2},
)
SKIPPED = ("titanmoe.train.trainer:all_reduce", "titanmoe.parallel.norm:all_reduce")
"""The first sums counts and losses, the second the gradient norm."""


class Hang(Run):
    timeout_s = TIMEOUT_S

    def __init__(self, folder: Path, seed: int, options: dict[str, Any] = LONG):
        super().__init__(folder, seed, {}, RANKS)
        self.options = TINY | options | self.draw.choice(MAPPINGS)
        self.rank = self.draw.randrange(RANKS)

    def strike(self, number: int) -> None:
        """Send the rank a signal in a random step."""
        step = 3 + self.draw.randrange(5)
        self.wait(lambda: self.step() >= step, "a few steps")
        time.sleep(self.draw.uniform(0, 0.3))
        os.kill(self.ranks()[self.rank], number)
        self.struck()

    def named(self) -> float:
        """How long it took until all had ended. Raises Wrong unless the last report names the rank."""
        self.wait(lambda: not self.agent.is_alive(), "the end of the run that was struck", None)
        took = time.monotonic() - self.struck_at
        said = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
        if not said or f"rank {self.rank} " not in said[-1] or "SIGKILL" in said[-1]:
            raise Wrong(f"rank {self.rank} was struck, and the last report is: {(said or ['none'])[-1]}")
        if "Traceback" in self.log.read_text(errors="replace").partition(said[-1])[0]:
            raise Wrong("a rank printed a traceback before the report")
        if took > WITHIN_S:
            raise Wrong(f"all had ended only after {took:.1f} s")
        return took


def stop(run: Hang) -> None:
    run.start()
    run.strike(signal.SIGSTOP)


def deadlock(run: Hang) -> None:
    run.start(faults=({"do": "deadlock", "on": ["signal"], "rank": run.rank},))
    run.strike(signal.SIGUSR1)


def leave(run: Hang) -> None:
    run.start(faults=({"do": "leave", "on": ["signal"], "rank": run.rank},))
    run.strike(signal.SIGUSR1)


def skip(run: Hang) -> None:
    run.start(faults=({"do": "skip", "on": ["signal"], "rank": run.rank, "path": run.draw.choice(SKIPPED)},))
    run.strike(signal.SIGUSR1)


def disk(run: Hang, path: str = layout.WRITING) -> None:
    """A disk that does not answer while a checkpoint is written."""
    run.options = {"checkpoint.interval": 4} | run.options | {"checkpoint.enable": "true"}
    run.options |= {"checkpoint.timeout_s": run.timeout_s}
    fault = {"do": "slow", "on": ["write"], "path": path, "rank": run.rank, "seconds": 1000}
    run.start(faults=(fault | {"once": str(run.struck_file)},))
    run.wait_for_strike()


KINDS: dict[str, Callable[[Hang], None]] = {
    "stop": stop,
    "deadlock": deadlock,
    "leave": leave,
    "skip": skip,
    "disk": disk,
}
WHAT = {
    "stop": "stopped (SIGSTOP)",
    "deadlock": "deadlock in Python",
    "leave": "one rank leaves, with exit code 0",
    "skip": "one rank skips a collective",
    "disk": "a disk that does not answer while saving",
}


def one(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    run = Hang(folder / str(seed), seed)
    outcome = {"launcher": run.launcher, "kind": kind, "seed": seed, "rank": run.rank, "seconds": None, "failure": ""}
    try:
        KINDS[kind](run)
        outcome["seconds"] = run.named()
    except Exception as wrong:
        outcome["failure"] = f"{type(wrong).__name__} {wrong}"
    finally:
        run.close()
        run.log.replace(folder / f"{seed}.log")
    return outcome


def table(outcomes: list[dict[str, Any]]) -> str:
    head = ("what happened", "under", "trials", "rank named", "seconds until all had ended: median", "max")
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for kind, launcher in product(WHAT, LAUNCHERS):
        if some := [each["seconds"] for each in outcomes if (each["kind"], each["launcher"]) == (kind, launcher)]:
            named = [seconds for seconds in some if seconds is not None]
            shown = [f"{seconds:.1f}" for seconds in (statistics.median(named), max(named))] if named else ["", ""]
            lines.append(f"| {WHAT[kind]} | {launcher} | {len(some)} | {len(named)} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="how many (default 20)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first trial")
    parser.add_argument("--only", choices=KINDS, metavar="KIND", help=f"one of: {', '.join(KINDS)}")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torchrun", help="what starts the ranks")
    parser.add_argument("--forks", action="store_true", help="ranks are forks of it, which have imported torch")
    parser.add_argument("--results", metavar="FILE", help="one line per trial; those already in it are not repeated")
    parser.add_argument("--out", metavar="FILE", help="also write the table there, between its marks")
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        parser.error("this needs Linux: it reads /proc")
    preload()
    Hang.forks, Hang.launcher = args.forks, args.launcher
    kinds = [args.only] if args.only else list(KINDS)
    asked = [(kinds[seed % len(kinds)], seed) for seed in range(args.first, args.first + args.trials)]
    results = Path(args.results) if args.results else None
    outcomes = [json.loads(line) for line in results.read_text().splitlines()] if results and results.exists() else []
    done = {(each["launcher"], each["kind"], each["seed"]) for each in outcomes}
    with workplace() as folder:
        for kind, seed in asked:
            if (args.launcher, kind, seed) in done:
                continue
            outcomes.append(one(kind, seed, folder))
            print(outcomes[-1], flush=True)
            if results:
                with results.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(outcomes[-1]) + "\n")
        text = table(outcomes)
        again = '--launcher "{launcher}" --only {kind} --first {seed} --trials 1: {failure}'
        failures = [again.format(**each) for each in outcomes if each["failure"]]
        print("\n" + text + "".join(f"  {line}\n" for line in failures))
        if args.out:
            write(Path(args.out), "hangs", text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
