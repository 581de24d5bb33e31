"""Every legal mapping of 8 ranks against the plain model, one after the other; resumes where it stopped.

    python -m tests.sweep                   run what docs/parity.jsonl lacks or what failed, then write docs/parity.md
    python -m tests.sweep --only pp2        only mappings whose name contains a text
    python -m tests.sweep --minutes 30      stop after a while; the next call goes on from there
    python -m tests.sweep --optimizer muon  three steps of Muon each, in docs/parity_muon.jsonl and a table of its own

Each of 517 mappings has one choice of each feature of tests/support/case_features.py, dealt out in turn. SETS names
further cases: pairs of schedules and context-parallel kinds, adapters, frozen weights, options, 16 ranks. A mapping
that crashes, hangs or is outside the tolerance has a row too, with its message in `failure`; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import parity
from tests.support import case_features
from tests.support.case_features import CP_KINDS, FEATURES, OPTIONS, SCHEDULES, TRAINED, changes
from tests.support.covering_mappings import all_folds, case_id, cover, degrees, has_several_ranks
from titanmoe.config.fields import replace_marked
from titanmoe.fold.degrees import Fold

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "parity.md"
ROWS = {"adamw": ROOT / "docs" / "parity.jsonl", "muon": ROOT / "docs" / "parity_muon.jsonl"}
"""By optimizer."""
COLUMNS = ("loss", "grads", "norm", "weights")
SETS = {"all": "all of 8 ranks", "pairs": "8 ranks, pairs of schedules and cp kinds", "16": "16 ranks"}
SETS["part"] = "8 ranks, adapters or a subset of the weights trained"
SETS["option"] = "8 ranks, dispatch saved, gradients accumulated or layers compiled"
NOT_DEALT = ("trained", "option")
DECKS = {"dispatcher": ["alltoall", "allgather", "hierarchical", "alltoall", "symm_mem", "hierarchical"]}
"""What is dealt of a feature, if not each choice once a round: the dispatchers that are usual twice."""
TIMEOUT_S = 600
CONDITIONED: dict[str, dict[str, Any]] = {"qwen3_next": {"model.norm_eps": 1e-2}}
"""Recipe keys of Muon's cases, by model: without them three steps of Muon amplify rounding beyond the tolerance, on one
rank too (docs/parity.md)."""


class Case(NamedTuple):
    fold: Fold
    choices: dict[str, str]
    set: str
    optimizer: str = "adamw"

    @property
    def changes(self) -> dict[str, Any]:
        return changes(self.fold, self.choices) | {"optimizer.name": self.optimizer} | self.conditions

    @property
    def conditions(self) -> dict[str, Any]:
        return CONDITIONED.get(self.choices.get("model", ""), {}) if self.optimizer == "muon" else {}

    @property
    def steps(self) -> int:
        return 3 if self.optimizer == "muon" else case_features.steps(self.choices)


def dealt(feature: str) -> Iterator[str]:
    """Yield every choice once per round, or as its deck has it, for ever.

    Rounds have different orders, so that no two features stay in step.
    """
    draw, choices = random.Random(feature), list(DECKS.get(feature, FEATURES[feature]))
    while True:
        draw.shuffle(choices)
        yield from choices


def spread(given: list[tuple[Fold, dict[str, str]]]) -> list[tuple[Fold, dict[str, str]]]:
    """Return the mappings with a choice of every feature not given: schedules only with stages, cp kinds only with cp.

    All is trained, with no option, unless given.
    """
    decks = {feature: dealt(feature) for feature in FEATURES if feature not in NOT_DEALT}
    out = []
    for fold, fixed in given:
        fits = {"schedule": 1 < fold.pp <= 4, "cp": fold.cp > 1}  # on 8 stages only 1F1B: others need 16 layers
        out.append((fold, {f: fixed.get(f) or next(deck) for f, deck in decks.items() if fits.get(f, True)} | fixed))
    return out


def pairs() -> list[tuple[Fold, dict[str, str]]]:
    """Return cases with every schedule on 2 and 4 pipeline ranks, every cp kind, and every pair of them.

    V schedules on 4 ranks have 8 stages.
    """
    pool = []
    for fold in all_folds(8):
        schedules = list(SCHEDULES) if 1 < fold.pp <= 4 else [""]
        kinds = list(CP_KINDS) if fold.cp > 1 else [""]
        pool += [(fold, s, k) for s in schedules for k in kinds if s or k]
    rows = [has_several_ranks(fold) | {"schedule": f"{s}{fold.pp}", "cp": k} for fold, s, k in pool]
    chosen = [pool[i] for i in cover(rows)]
    return [(fold, ({"schedule": s} if s else {}) | ({"cp": k} if k else {})) for fold, s, k in chosen]


def partly() -> list[tuple[Fold, dict[str, str]]]:
    """Return mappings with every pair of two axes' degrees, or of one and what is trained."""
    pool = [(fold, what) for fold in all_folds(8) for what in TRAINED if what != "all"]
    rows = [degrees(fold) | {"trained": what} for fold, what in pool]
    return [(pool[i][0], {"trained": pool[i][1]}) for i in cover(rows)]


def with_options() -> list[tuple[Fold, dict[str, str]]]:
    """Return mappings with every pair of two axes' degrees, or of one and an option.

    Gradients accumulate only where no data rank shares an expert; saving dispatched tokens is a kind of recomputation.
    """
    pool = [(fold, option) for fold in all_folds(8) for option in OPTIONS if option != "accumulated" or fold.edp == 1]
    rows = [degrees(fold) | {"option": option} for fold, option in pool]
    instead = {"dispatch_saved": {"recompute": "none"}}
    return [(fold, instead.get(option, {}) | {"option": option}) for fold, option in (pool[i] for i in cover(rows))]


def sixteen() -> list[Fold]:
    return [
        Fold(world=16, pp=2, dp_replicate=1, dp_shard=2, cp=2, tp=2, edp_replicate=1, edp=2, ep=4, etp=1),
        Fold(
            world=16, pp=2, dp_replicate=1, dp_shard=2, cp=2, tp=2, edp_replicate=1, edp=1, ep=8, etp=1
        ),  # the paper's
        Fold(world=16, pp=1, dp_replicate=2, dp_shard=2, cp=2, tp=2, edp_replicate=2, edp=2, ep=2, etp=2),
        Fold(world=16, pp=4, dp_replicate=1, dp_shard=2, cp=1, tp=2, edp_replicate=1, edp=1, ep=2, etp=2),
    ]


def cases(optimizer: str = "adamw") -> dict[str, Case]:
    if optimizer == "muon":  # which refuses adapters
        some = {name: case for name, case in cases().items() if case.set in ("all", "part", "16")}
        trained = {name: case for name, case in some.items() if case.choices.get("trained") != "adapters"}
        return {name: case._replace(optimizer=optimizer) for name, case in trained.items()}
    out = {case_id(fold): Case(fold, choice, "all") for fold, choice in spread([(f, {}) for f in all_folds(8)])}
    given = pairs()
    for (fold, choice), (_, fixed) in zip(spread(given), given, strict=True):
        out["-".join([case_id(fold), *fixed.values()])] = Case(fold, choice, "pairs")
    for fold, choice in spread(partly()):
        out["-".join([case_id(fold), choice["trained"]])] = Case(fold, choice, "part")
    for fold, choice in spread(with_options()):
        out["-".join([case_id(fold), choice["option"]])] = Case(fold, choice, "option")
    return out | {f"16-{case_id(fold)}": Case(fold, {}, "16") for fold in sixteen()}


Row = dict[str, Any]


def read(rows: Path) -> list[Row]:
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def is_of(row: Row, case: Case) -> bool:
    """Return whether a row was measured with this case's choices and conditions."""
    return row["choices"] == case.choices and row.get("conditions", {}) == case.conditions


def measured(name: str, case: Case) -> Row:
    """Run a case and return its row, whether it passes or fails."""
    errors, failure = {}, ""
    try:
        documents = case.choices.get("documents") == "yes"
        errors = parity.check(case.fold.world, case.changes, documents, timeout=TIMEOUT_S, steps=case.steps)
    except Exception as error:  # any failure belongs in the row, and the sweep goes on
        errors, failure = getattr(error, "errors", {}), f"{type(error).__name__}: {error}"
    conditions = {"conditions": case.conditions} if case.conditions else {}
    return {
        "name": name,
        "set": case.set,
        "choices": case.choices,
        **conditions,
        "errors": {part: float(f"{value:.1e}") for part, value in errors.items()},
        "failure": failure,
    }


def run(optimizer: str, only: str = "", minutes: float = math.inf) -> dict[str, Row]:
    """Run the cases that have no row, or one of other choices, then those that failed. Return all rows by name."""
    every, rows = cases(optimizer), ROWS[optimizer]
    found = {row["name"]: row for row in read(rows) if row["name"] in every and is_of(row, every[row["name"]])}
    passed = {name for name, row in found.items() if not row["failure"]}
    todo = sorted((name for name in every if name not in passed and only in name), key=lambda name: name in found)
    started = time.monotonic()
    for number, name in enumerate(todo, 1):
        if time.monotonic() - started >= 60 * minutes:
            break
        row = found[name] = measured(name, every[name])
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        left = (time.monotonic() - started) / number * (len(todo) - number)
        worst = row["failure"].partition("\n")[0] or f"{max(row['errors'].values()):.1e}"
        print(f"{number}/{len(todo)}  {name:<55} {worst}  {left / 60:.0f} min left", flush=True)
    done = {name: found[name] for name in every if name in found}
    rows.write_text("".join(json.dumps(row) + "\n" for row in done.values()))  # in order, without duplicates
    return done


def summary(rows: list[Row], features: Iterable[str]) -> str:
    """Return a table of the worst errors of each set, and one of how many mappings met each choice of a feature.

    Balance terms, loads, ... are together in the last column; a mapping that crashed has no errors and is only counted.
    """

    def line(title: str, some: list[Row]) -> str:
        errors = [row["errors"] for row in some if row["errors"]]
        others = [value for each in errors for name, value in each.items() if name not in COLUMNS]
        worst = [max((each[name] for each in errors), default=0.0) for name in COLUMNS] + [max(others, default=0.0)]
        cells = [title, len(some), sum(bool(row["failure"]) for row in some), *(f"{value:.1e}" for value in worst)]
        return f"| {' | '.join(map(str, cells))} |"

    out = [
        "| set | mappings | failed | loss | gradients | norm | weights | others |",
        "|---|---|---|---|---|---|---|---|",
    ]
    out += [line(title, some) for key, title in SETS.items() if (some := [row for row in rows if row["set"] == key])]
    if features:
        out += ["", "| feature | choices | mappings of each |", "|---|---|---|"]
    for feature in features:
        met = Counter(row["choices"][feature] for row in rows if feature in row["choices"])
        each = f"{min(met.values())} to {max(met.values())}" if met else "none yet"
        out.append(f"| {feature} | {', '.join(choice for choice in FEATURES[feature] if choice in met)} | {each} |")
    return "\n".join(out)


def page(rows: list[Row], optimizer: str) -> str:
    """Return the summary of an optimizer's rows in docs/parity.md."""
    table = summary(rows, FEATURES if optimizer == "adamw" else ())
    return f"{agreeing(rows, optimizer)} agree, {len(rows)} were run; float64 over gloo.\n\n{table}"


def agreeing(rows: list[Row], optimizer: str) -> str:
    """Return how many mappings agree, as pages say it."""
    return f"{sum(not row['failure'] for row in rows)} of {len(cases(optimizer))} mappings"


def marks(optimizer: str) -> tuple[str, str]:
    """Return the marks of its table's beginning and end in docs/parity.md."""
    return f"<!-- table of {optimizer} -->", f"<!-- end of {optimizer} -->"


def write(rows: list[Row], optimizer: str) -> None:
    PAGE.write_text(replace_marked(PAGE.read_text(), *marks(optimizer), f"\n\n{page(rows, optimizer)}\n\n"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--optimizer", default="adamw", choices=ROWS)
    options = parser.parse_args()
    done = run(options.optimizer, options.only, options.minutes)
    failed = [row for row in done.values() if row["failure"]]
    for row in failed:
        print(f"\n{row['name']} failed: {row['failure']}")
    write(list(done.values()), options.optimizer)
    print(page(list(done.values()), options.optimizer))
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
