"""The planner against published runs, what folding gains, and planned memory against rehearsals: tables of the docs.

    python scripts/planner_page.py            accuracy by source and by kind of mapping, in docs/planner.md; every row
                                              in docs/planner_rows.jsonl
    python scripts/planner_page.py --memory   planned memory of the shipped recipes, in docs/planner.md and
                                              docs/planned_memory.jsonl: rehearses them, ten CPU-minutes
    python scripts/planner_page.py --folding  what folding gains, in docs/folding.md and docs/folding_gains.jsonl: some
                                              CPU-minutes
    python scripts/planner_page.py --fit      print the factors that the calibration rows give

scripts/published_runs.py makes configurations of the rows. The calibration rows were chosen before anything was
compared; a row marked "fit" has fitted a figure of its stack (titanmoe/plan/training_stacks.py). Both are left out of
errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import mean, median
from textwrap import wrap
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from scripts.published_runs import (  # noqa: E402
    LATER,
    PAPER,
    device_of,
    price_of,
    published_step,
    read_rows,
    run_of,
    why_not_compared,
)
from titanmoe.components import COMPONENTS  # noqa: E402
from titanmoe.config.load import load, read_draft  # noqa: E402
from titanmoe.config.recipe import find_recipe, shipped_recipes  # noqa: E402
from titanmoe.config.schema import Config  # noqa: E402
from titanmoe.config.world_size import recipe_ranks  # noqa: E402
from titanmoe.fold.degrees import Fold, derive  # noqa: E402
from titanmoe.plan.links import Factors  # noqa: E402
from titanmoe.plan.memory import rank_memories  # noqa: E402
from titanmoe.plan.plan_table import TIE, kind_of_mapping  # noqa: E402
from titanmoe.plan.price import Price  # noqa: E402
from titanmoe.plan.search import PricedMapping, search  # noqa: E402
from titanmoe.text_report import format_bytes  # noqa: E402

PAGE, EVERY, MEMORY, FOLDING_PAGE, FOLDING = (
    ROOT / "docs" / name
    for name in ("planner.md", "planner_rows.jsonl", "planned_memory.jsonl", "folding.md", "folding_gains.jsonl")
)
ACCURACY = "<!-- from here: python scripts/planner_page.py -->\n"
REHEARSED = "<!-- from here: python scripts/planner_page.py --memory -->\n"
FOLDING_MARK = "<!-- from here: python scripts/planner_page.py --folding -->\n"
END = "<!-- to here -->\n"
CALIBRATION = (
    "mpf-t3-mixtral-8x22b-mcore-128g-s4096",
    "mpf-t3-mixtral-8x22b-fsdp+ep-128g-s4096",
    "mpf-t3-mixtral-8x22b-g8t8-mcore-128g-s4096",
    "mpf-t3-qwen2-57b-a14b-tp+ep+dp-64g-s4096",
    "mpf-t4-mixtral-8x22b-folding-1024g-s4096",
    "zoo-qwen235-deepep-tp2pp8ep32",
    "zoo-qwen235-long128k-force-balance",
)
"""One of each kind of strategy and of each thing that a factor stands for."""
START = Factors(matrix=1.0, attention=1.0, memory=0.8, link=0.7, network=0.7, rows=0.85, block=6e-4)
"""First guesses of the factors, to which the fit is drawn, because seven rows cannot tell seven factors apart."""
DRAWN = {"matrix": 0.1, "attention": 0.15, "memory": 0.2, "link": 0.25, "network": 0.25, "rows": 0.25, "block": 0.7}
"""Standard deviation of each factor's logarithm around START in the fit; that of a row around its plan is NOISE."""
NOISE = 0.05


# ---- published runs


@dataclass
class Row:
    """A published run and the planner's price of its configuration."""

    row: dict[str, Any]
    published: float
    """Published seconds of a step."""
    price: Price
    kind: str
    """Kind of the run's mapping (`kind_of_mapping`)."""

    @property
    def error(self) -> float:
        """Planned seconds of a step over the published ones, minus 1."""
        return self.price.step / self.published - 1

    @property
    def fitted(self) -> bool:
        """True if a factor or a figure of a stack was fitted to this run."""
        return self.row["id"] in CALIBRATION or "split" in self.row


def priced_rows(rows: list[dict[str, Any]], factors: Factors) -> list[Row]:
    """Price those published runs that state enough to be compared, and return them with their prices."""
    priced = []
    for row in rows:
        if not why_not_compared(row) and (published := published_step(row)):
            price, run = price_of(row, factors), run_of(row)
            priced.append(Row(row, published, price, kind_of_mapping(run.fold, price)))
    return priced


def fit(rows: list[dict[str, Any]]) -> Factors:
    """Fit the planner's factors to the calibration rows by least squares, and return them.

    Gauss-Newton on logarithms; residuals are the rows' errors and the factors' distances from START.
    """
    rows = [row for row in rows if row["id"] in CALIBRATION]
    keys = [field.name for field in fields(Factors)]
    start, spread = (np.array([float(x) for x in values]) for values in (
        [log(getattr(START, key)) for key in keys], [DRAWN[key] for key in keys]
    ))  # fmt: skip

    def residuals(at: np.ndarray) -> np.ndarray:
        factors = Factors(**dict(zip(keys, np.exp(at).tolist(), strict=True)))
        errors = [log(price_of(row, factors).step / published_step(row)) / NOISE for row in rows]
        return np.array([*errors, *((at - start) / spread)])

    at = start.copy()
    for _ in range(6):
        here = residuals(at)
        slopes = np.stack([(residuals(at + 0.02 * unit) - here) / 0.02 for unit in np.eye(len(keys))], 1)
        at += np.clip(np.linalg.lstsq(slopes, -here, rcond=None)[0], -0.3, 0.3)
    return Factors(**{key: float(f"{exp(x):.3g}") for key, x in zip(keys, at, strict=True)})


def quantile(values: list[float], fraction: float) -> float:
    """Return the value below which this fraction of the values is."""
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


SOURCES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "Folding paper: FSDP + EP": lambda row: row["framework"] == "FSDP+EP" and row["id"][:3] == "mpf",
    "Folding paper: TP + EP + DP (experts sharded by etp)": lambda row: row["framework"] == "TP+EP+DP",
    "Folding paper: pipelines, unfolded and folded": lambda row: row["id"].startswith("mpf") and row["pp"] > 1,
    "Megatron model zoo": lambda row: "ModelZoo" in row["source"],
    "Megatron Bridge but gpt-oss and Moonlight": lambda row: "qwen30b" in row["id"] and "Bridge" in row["framework"],
    "Megatron Bridge: gpt-oss": lambda row: "gpt-oss" in row["id"] or "later-gptoss" in row["id"],
    "Megatron Bridge: Moonlight, 4 samples a step": lambda row: "moonlight" in row["id"],
    "AutoModel (FSDP2)": lambda row: "AutoModel" in row["framework"],
    "TorchTitan, 8 H200 (fit)": lambda row: row["framework"] == "torchtitan",
    "prime-rl, LoRA under FSDP2 (fit)": lambda row: "prime-rl" in row["framework"],
}


def by_source(priced: list[Row]) -> list[tuple[str, ...]]:
    """Return the cells of a table with a row for each source: number of runs, and median, mean and worst error."""
    body = []
    for name, belongs in SOURCES.items():
        errors = [one.error for one in priced if belongs(one.row) and ("fit" in name or not one.fitted)]
        worst = max(errors, key=abs)
        middle = f"{median(map(abs, errors)):.0%}"
        body.append((name, str(len(errors)), middle, f"{mean(errors):+.0%}", f"{worst:+.0%}"))
    held_out = [one.error for one in priced if not one.fitted]
    worst = max(held_out, key=abs)
    total = f"{median(map(abs, held_out)):.0%}", f"{mean(held_out):+.0%}", f"{worst:+.0%}"
    return [*body, ("all rows that were not used in the fit", str(len(held_out)), *total)]


def ranges(priced: list[Row]) -> dict[str, float]:
    """Return the error that four of five published runs do not exceed, by kind of mapping."""
    errors = defaultdict(list)
    for one in priced:
        errors[one.kind].append(abs(one.error))
    return {kind: quantile(found, 0.8) for kind, found in errors.items()}


def order(priced: list[Row]) -> tuple[int, int, int, int, float]:
    """Compare how the planner orders mappings of one model, batch and world with the order that the paper published.

    Returns:
        The number of pairs of mappings of which the planner names the faster one, the number of pairs, the number of
            groups of which it names the fastest one, the number of groups, and the error of the ratio of two step times
            within which four of five pairs are.
    """
    groups, pairs, ratios = defaultdict(list), [], []
    for one in priced:
        if one.row["source"].startswith(PAPER):  # one release of one software
            groups[tuple(one.row[key] for key in ("model", "gpus", "gbs"))].append(one)
    sets = [group for group in groups.values() if len({one.price.step for one in group}) > 1]
    for group in sets:
        for a, b in combinations(group, 2):
            if a.published != b.published:
                pairs.append((a.published < b.published) == (a.price.step < b.price.step))
                ratios.append(abs(a.price.step / b.price.step / (a.published / b.published) - 1))
    first = [min(group, key=lambda one: one.published) is min(group, key=lambda one: one.price.step) for group in sets]
    return sum(pairs), len(pairs), sum(first), len(first), quantile(ratios, 0.8)


def table_of(head: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    rows = ["| " + " | ".join(cells) + " |" for cells in body]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows, ""]


CELLS = ("row", "published, s", "planned, s", "error", "kind of mapping", "stack", "after matrix work", "fitted")


def cells(one: Row) -> tuple[str, ...]:
    times = f"{one.published:.2f}", f"{one.price.step:.2f}", f"{one.error:+.0%}"
    return one.row["id"], *times, one.kind, run_of(one.row).stack.name, one.price.bottleneck, "yes" * one.fitted


def every_row(priced: list[Row]) -> str:
    return "".join(json.dumps(dict(zip(CELLS, cells(one), strict=True))) + "\n" for one in priced)


def accuracy(priced: list[Row]) -> str:
    """Return the text of docs/planner.md on the planner's accuracy, which stands between the marks ACCURACY and END."""
    right, pairs, first, groups, ratio = order(priced)
    body = [(kind, f"{error:.0%}") for kind, error in sorted(ranges(priced).items())]
    text = (
        f"Order of the paper's mappings of one model, batch and number of GPUs: the planner names the faster of two in "
        f"{right} of {pairs} pairs, and the fastest in {first} of {groups} groups. Four of five ratios of two step "
        f"times are within {ratio:.0%} of the published ratio."
    )
    lines = ["", *table_of(("source", "rows", "median error", "mean", "worst"), by_source(priced))]
    lines += [*wrap(text, 120), "", "Four of five published step times are within this error of the planned one:", ""]
    return "\n".join([*lines, *table_of(("kind of mapping", "error"), body)]) + "\n"


# ---- memory of the shipped recipes, planned and rehearsed


def planned_peaks(name: str) -> tuple[Config, Fold, dict[int, int]]:
    """Plan the peak memory of a shipped recipe under its own mapping.

    Returns:
        The config, the degrees, and the planned bytes of the first, the last and the fullest pipeline rank, by number
        of the rank.
    """
    from titanmoe.rehearse.rehearsal import recipe_to_rehearse  # only here, because it takes torch seconds to start

    path = find_recipe(name)
    world = recipe_ranks(read_draft([str(path)], COMPONENTS))
    config = recipe_to_rehearse(["--config", str(path)], world, "h100")
    fold = derive(world, config.parallelism)
    peaks = [rank.peak for rank in rank_memories(config, fold)]
    return config, fold, {i: peaks[i] for i in sorted({0, fold.pp - 1, peaks.index(max(peaks))})}


MEMORY_HEAD = ("recipe", "pipeline rank", "planned", "rehearsed", "error")


def read_memory() -> list[tuple[str, ...]]:
    return [tuple(json.loads(line).values()) for line in MEMORY.read_text(encoding="utf-8").splitlines()]


def memory_rows(recipes: list[str]) -> list[tuple[str, ...]]:
    """Rehearse recipes; return a row of cells for each rehearsed rank, as in MEMORY_HEAD.

    Args:
        recipes: names of recipes to rehearse, [] for all; rows of other recipes are those stored in docs/.
    """
    from titanmoe.rehearse.rehearsal import rehearse

    old_rows, rows = read_memory(), []
    for name in shipped_recipes():
        if name in ("sft_debug", "dpo_debug"):  # their sizes are in a model that is made when it is needed
            continue
        if recipes and name not in recipes:
            rows += [row for row in old_rows if row[0] == name]
            continue
        config, fold, peaks = planned_peaks(name)
        for rank, planned in peaks.items():
            peak = rehearse(config, fold.world, rank * fold.stage, "h100").memory.peak
            place = f"{rank} of {fold.pp}"
            rows.append((name, place, format_bytes(planned), format_bytes(peak), f"{planned / peak - 1:+.1%}"))
            print(*rows[-1], flush=True)
    return rows


def memory_table(rows: list[tuple[str, ...]]) -> str:
    """Return the table of docs/planner.md: of each recipe for GPUs the rank whose rehearsed memory is largest."""
    fullest: dict[str, tuple[str, ...]] = {}
    for row in rows:
        name, rehearsed = row[0], row[3]
        if "debug" not in name and (name not in fullest or in_gb(rehearsed) > in_gb(fullest[name][3])):
            fullest[name] = row
    return "\n".join(table_of(MEMORY_HEAD, list(fullest.values())))


def in_gb(text: str) -> float:
    return float(text.removesuffix(" GB"))


# ---- what folding gains

LONG = 131072


def with_long_samples(config: Config, ranks: int) -> tuple[list[str], int]:
    training = config.training
    samples = max(ranks // 8, training.global_batch_size * training.seq_len // LONG)
    options = {"seq_len": LONG, "local_batch_size": 1, "global_batch_size": samples}
    return ["--moe.overlap=none", *(f"--training.{key}={value}" for key, value in options.items())], ranks


SETTINGS: dict[str, Callable[[Config, int], tuple[list[str], int]]] = {
    "as it is": lambda config, ranks: ([], ranks),
    "4 x the GPUs": lambda config, ranks: ([], 4 * ranks),
    "128K tokens": with_long_samples,
}
"""Changes to a recipe and its number of GPUs: the same batch on more of them, and samples of 128K tokens."""


def folding_gains() -> list[dict[str, Any]]:
    """Find the fastest mapping and the fastest unfolded one of each recipe and setting.

    Returns:
        A dict for each recipe and setting: "best" and "unfolded", if any fits, have the mapping as options, with its
            kind and seconds per step.
    """
    gains = []
    for name in (name for name in shipped_recipes() if "debug" not in name):
        own = recipe(name)
        for setting, change in SETTINGS.items():
            changed, ranks = change(own, recipe_ranks(read_draft([str(find_recipe(name))], COMPONENTS)))
            result = search(recipe(name, changed), ranks, device_of("H100"), Factors(), 1)
            mappings = {"best": result.best[0] if result.best else None, "unfolded": result.best_unfolded}
            found = {
                kind: {"seconds": one.price.step, "kind": kind_of_mapping(one.fold, one.price)} | overrides(one)
                for kind, one in mappings.items()
                if one
            }
            gains.append({"recipe": name, "setting": setting, "ranks": ranks, "changed": changed} | found)
            print(*folding_cells(gains[-1]), flush=True)
    return gains


def recipe(name: str, changed: Sequence[str] = ()) -> Config:
    return load(["--config", str(find_recipe(name)), *changed], COMPONENTS, lambda config: [])


def overrides(mapping: PricedMapping) -> dict[str, Any]:
    config, fold = mapping.config, mapping.fold
    return {
        "training.local_batch_size": config.training.local_batch_size,
        **{f"parallelism.{axis}": getattr(fold, axis) for axis in ("pp", "dp_replicate", "cp", "tp")},
        **{f"parallelism.experts.{axis}": getattr(fold, axis) for axis in ("edp_replicate", "ep", "etp")},
        "pipeline.schedule": config.pipeline.schedule,
        "pipeline.virtual_stages": config.pipeline.virtual_stages,
        "activation_checkpoint.mode": config.activation_checkpoint.mode,
        "moe.dispatcher": config.moe.dispatcher,
        "moe.overlap": config.moe.overlap,
        "parallelism.reshard_after_forward": config.parallelism.reshard_after_forward,
    }


def gain(row: dict[str, Any]) -> float:
    """Return how much longer the fastest unfolded mapping takes than the fastest one, as a fraction."""
    return row["unfolded"]["seconds"] / row["best"]["seconds"] - 1


def verdict(row: dict[str, Any]) -> str:
    if "best" not in row:
        return "nothing fits"
    if "unfolded" not in row:
        return "no unfolded mapping fits"
    return f"{gain(row):.0%}" + ("" if gain(row) > TIE else ", a tie" if gain(row) > 0.005 else ", the same")


def folding_cells(row: dict[str, Any]) -> tuple[str, ...]:
    def mapping(kind: str) -> str:
        if kind not in row:
            return "-"
        chosen = row[kind]
        attention = [f"{axis} {n}" for axis in ("pp", "cp", "tp") if (n := chosen[f"parallelism.{axis}"]) > 1]
        experts = [f"{axis} {n}" for axis in ("ep", "etp") if (n := chosen[f"parallelism.experts.{axis}"]) > 1]
        return f"{' '.join(attention) or '1'} / {' '.join(experts) or '1'}: {chosen['seconds']:.3g} s"

    return row["recipe"], row["setting"], f"{row['ranks']:,}", mapping("best"), mapping("unfolded"), verdict(row)


FOLDING_HEAD = ("recipe", "setting", "GPUs", "fastest: attention / experts", "fastest unfolded", "takes longer by")


def gains_by_recipe(gains: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row of cells for each recipe: what folding gains in each setting, "-" for nothing."""
    cells: dict[str, list[str]] = defaultdict(list)
    for row in gains:
        percent = verdict(row).partition(",")[0]
        cells[row["recipe"]].append("-" if verdict(row).endswith("the same") else percent)
    return [(name, *found) for name, found in cells.items()]


def folding_tables(gains: list[dict[str, Any]]) -> str:
    """Return two tables in Markdown: what folding gains for each recipe, and the mappings with a gain above TIE."""
    lines = table_of(("recipe", *SETTINGS), gains_by_recipe(gains))
    lines += [f"The mappings where the gain is above {TIE:.0%}:", ""]
    lines += table_of(FOLDING_HEAD, [folding_cells(row) for row in gains if "best" in row and is_large(row)])
    return "\n".join(lines)


def is_large(row: dict[str, Any]) -> bool:
    """Return whether folding gains more than TIE, the error of a planned ratio, or only folded mappings fit."""
    return "unfolded" not in row or gain(row) > TIE


def replace_marked(page: Path, mark: str, text: str) -> None:
    """Replace the text of a page between a mark and the next END."""
    before, _, rest = page.read_text(encoding="utf-8").partition(mark)
    page.write_text(before + mark + text + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print what the calibration rows give")
    parser.add_argument("--memory", nargs="*", metavar="RECIPE", help="rehearse these recipes, or all")
    parser.add_argument("--folding", action="store_true", help="write what folding gains into docs/folding.md")
    args = parser.parse_args()
    if args.folding:
        gains = folding_gains()
        FOLDING.write_text("".join(json.dumps(row) + "\n" for row in gains), encoding="utf-8")
        replace_marked(FOLDING_PAGE, FOLDING_MARK, "\n" + folding_tables(gains) + "\n")
        return
    if args.memory is not None:
        rows = memory_rows(args.memory)
        lines = (json.dumps(dict(zip(MEMORY_HEAD, row, strict=True))) + "\n" for row in rows)
        MEMORY.write_text("".join(lines), encoding="utf-8")
        replace_marked(PAGE, REHEARSED, "\n" + memory_table(rows) + "\n")
        return
    rows = read_rows()
    if args.fit:
        print(json.dumps(asdict(fit(rows))))
        return
    priced = priced_rows(rows + read_rows(LATER), Factors())
    replace_marked(PAGE, ACCURACY, accuracy(priced))
    EVERY.write_text(every_row(priced), encoding="utf-8")


if __name__ == "__main__":
    main()
