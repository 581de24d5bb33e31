"""Every legal mapping of 8 ranks against the plain model, one after the other; resumes where it stopped.

    python -m tests.sweep                         run what is missing, print a table, write docs/parity.md
    python -m tests.sweep --only pp2              those whose name holds a text
    python -m tests.sweep --results FILE          one JSON line per mapping; runs/parity.jsonl if not given

517 mappings with the default schedule (1F1B) and ring attention; the other schedules and context-parallel kinds by a
cover of all pairs; and 16-rank mappings, the paper's convergence run among them. Pools of ranks are renewed as they go
(tests/world.py), so the number of process groups stays bounded.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from tests import parity, world
from tests.features import CP_KINDS, SCHEDULES, changes
from tests.mappings import all_folds, cover, named, one_or_more
from titanmoe.fold.degrees import Fold

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "parity.md"
COLUMNS = ("loss", "grads", "norm", "weights")
MARK = "<!-- table -->"


def default_kinds() -> dict[str, tuple[int, dict[str, Any]]]:
    return {named(fold): (8, changes(fold, {})) for fold in all_folds(8)}


def other_kinds() -> dict[str, tuple[int, dict[str, Any]]]:
    """Every schedule on 2 and 4 pipeline ranks (8 stages for V schedules on 4), every cp kind, every pair of them."""
    pool = []
    for fold in all_folds(8):
        schedules = list(SCHEDULES) if 1 < fold.pp <= 4 else [""]
        kinds = list(CP_KINDS) if fold.cp > 1 else [""]
        pool += [(fold, s, k) for s in schedules for k in kinds if s or k]
    rows = [one_or_more(fold) | {"schedule": f"{s}{fold.pp}", "cp": k} for fold, s, k in pool]
    out = {}
    for i in cover(rows):
        fold, schedule, kind = pool[i]
        choice = ({"schedule": schedule} if schedule else {}) | ({"cp": kind} if kind else {})
        out["-".join([named(fold), *choice.values()])] = (8, changes(fold, choice))
    return out


def sixteen() -> dict[str, tuple[int, dict[str, Any]]]:
    folds = (
        Fold(16, pp=2, dp_replicate=1, dp_shard=2, cp=2, tp=2, edp_replicate=1, edp=2, ep=4, etp=1),
        Fold(16, pp=2, dp_replicate=1, dp_shard=2, cp=2, tp=2, edp_replicate=1, edp=1, ep=8, etp=1),  # the paper's
        Fold(16, pp=1, dp_replicate=2, dp_shard=2, cp=2, tp=2, edp_replicate=2, edp=2, ep=2, etp=2),
        Fold(16, pp=4, dp_replicate=1, dp_shard=2, cp=1, tp=2, edp_replicate=1, edp=1, ep=2, etp=2),
    )
    return {f"16-{named(fold)}": (16, changes(fold, {})) for fold in folds}


def cases() -> dict[str, tuple[int, dict[str, Any]]]:
    return default_kinds() | other_kinds() | sixteen()


def run(results: Path, only: str = "") -> dict[str, dict[str, Any]]:
    """Errors by name; a mapping whose result is in the file is not run again unless it failed."""
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = results.read_text().splitlines() if results.exists() else []
    done = {line["name"]: line for line in map(json.loads, lines) if not line["failure"]}
    todo = {name: case for name, case in cases().items() if name not in done and only in name}
    started = time.monotonic()
    for number, (name, (size, recipe)) in enumerate(todo.items(), 1):
        began, errors, failure = time.monotonic(), {}, ""
        try:
            errors = parity.check(size, recipe, timeout=300)
        except (AssertionError, world.RankError) as error:
            failure = str(error)
        line = {"name": name, "ranks": size, "failure": failure, "seconds": time.monotonic() - began} | errors
        done[name] = line
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        left = (time.monotonic() - started) / number * (len(todo) - number)
        worst = failure.partition("\n")[0] or f"{max(errors[c] for c in COLUMNS):.1e}"
        print(f"{number}/{len(todo)}  {name:<55} {worst}  {left / 60:.0f} min left", flush=True)
    return {name: done[name] for name in cases() if name in done}


def table(done: dict[str, dict[str, Any]]) -> str:
    rows = ["| mapping | loss | gradients | norm | weights |", "|---|---|---|---|---|"]
    rows += [f"| {name} | " + " | ".join(f"{line[c]:.1e}" for c in COLUMNS) + " |" for name, line in done.items()]
    return "\n".join(rows)


def summary(done: dict[str, dict[str, Any]]) -> str:
    rows = ["| set | mappings | loss | gradients | norm | weights |", "|---|---|---|---|---|---|"]
    sets = {
        "all of 8 ranks, 1F1B and ring": default_kinds(),
        "other schedules and cp kinds": other_kinds(),
        "16 ranks": sixteen(),
    }
    for title, members in sets.items():
        lines = [done[name] for name in members if name in done]
        if lines:
            worst = " | ".join(f"{max(line[c] for line in lines):.1e}" for c in COLUMNS)
            rows.append(f"| {title} | {len(lines)} of {len(members)} | {worst} |")
    return "\n".join(rows)


def write_page(done: dict[str, dict[str, Any]]) -> None:
    text = PAGE.read_text().partition(MARK)[0]
    minutes = sum(line["seconds"] for line in done.values()) / 60
    made = f"torch {torch.__version__}, float64, gloo; {minutes:.0f} minutes"
    PAGE.write_text(f"{text}{MARK}\n\nMade with {made}.\n\n{summary(done)}\n\n## Every mapping\n\n{table(done)}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "parity.jsonl")
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    done = run(options.results, options.only)
    failed = [name for name, line in done.items() if line["failure"]]
    print(summary({name: line for name, line in done.items() if not line["failure"]}))
    if failed:
        print(f"{len(failed)} failed:", *failed, sep="\n  ")
        return 1
    if not options.only:
        write_page(done)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
