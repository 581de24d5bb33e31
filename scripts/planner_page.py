"""Compare the planner with published runs and with rehearsals, and find what folding gains: tables of the docs.

    python scripts/planner_page.py            published runs: docs/planner.md, planner_rows.jsonl
    python scripts/planner_page.py --memory   shipped recipes, rehearsed in ten CPU-minutes: planned_memory.jsonl too
    python scripts/planner_page.py --folding  what folding gains: docs/folding.md, folding_gains.jsonl
    python scripts/planner_page.py --fit      print the factors that the calibration rows give

Published runs are rows of tests/data/published_runs.jsonl and published_later.jsonl, each with its source. Rows with
"split" = "calibration" were chosen before anything was compared, those with "fit" have fitted a figure of their stack:
both are left out of the errors by source, but of sources named "(fit)". Rows with "not_judged", the reason, are shown
apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import mean, median
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from titanmoe.components import COMPONENTS  # noqa: E402
from titanmoe.config.fields import flatten, replace_marked, with_values  # noqa: E402
from titanmoe.config.load import load, read_draft  # noqa: E402
from titanmoe.config.recipe import find_recipe, shipped_recipes  # noqa: E402
from titanmoe.config.schema import Config, Model  # noqa: E402
from titanmoe.config.world_size import recipe_ranks  # noqa: E402
from titanmoe.files import format_bytes  # noqa: E402
from titanmoe.fold.degrees import DEGREE_PATHS, Fold, derive  # noqa: E402
from titanmoe.models.count import flops_per_token  # noqa: E402
from titanmoe.models.families import preset  # noqa: E402
from titanmoe.plan.devices import read_device  # noqa: E402
from titanmoe.plan.links import Factors  # noqa: E402
from titanmoe.plan.memory import rank_memories  # noqa: E402
from titanmoe.plan.plan_table import TIE, kind_of_mapping  # noqa: E402
from titanmoe.plan.price import Price, Pricer  # noqa: E402
from titanmoe.plan.search import PricedMapping, search  # noqa: E402
from titanmoe.plan.training_stacks import AUTOMODEL, MEGATRON, TORCHTITAN, Stack  # noqa: E402

Json = dict[str, Any]
Cells = tuple[str, ...]

PAGE, EVERY, MEMORY, FOLDING_PAGE, FOLDING = (
    ROOT / "docs" / name
    for name in ("planner.md", "planner_rows.jsonl", "planned_memory.jsonl", "folding.md", "folding_gains.jsonl")
)
ROWS, LATER = (ROOT / "tests" / "data" / name for name in ("published_runs.jsonl", "published_later.jsonl"))

# ---- published runs

PAPER = "arXiv 2504.14960"
MODES = {"full": "full", "selective": "selective", "moe": "moe", "layernorm": "selective", "norm": "selective"}
"""Mode of recomputation by a word of the row; others cost next to nothing in time."""
PRIOR = {
    "matrix": (1.0, 0.1),
    "attention": (1.0, 0.15),
    "memory": (0.8, 0.2),
    "link": (0.7, 0.25),
    "network": (0.7, 0.25),
    "all_to_all": (0.85, 0.25),
    "block": (6e-4, 0.7),
}
"""First guess of each factor and the standard deviation of its logarithm: seven rows cannot tell seven factors apart.
That of a row around its plan is NOISE."""
NOISE = 0.05


class Row(NamedTuple):
    """A published run, and the planner's price of its configuration."""

    row: Json
    published: float
    """Published seconds of a step."""
    stack: Stack
    price: Price
    kind: str
    """Kind of the run's mapping (`kind_of_mapping`)."""
    fitted: bool
    """True if a factor or a figure of a stack was fitted to this run."""

    @property
    def error(self) -> float:
        """Planned seconds of a step over the published ones, minus 1."""
        return self.price.step / self.published - 1


def read_rows(path: Path = ROWS) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@lru_cache(maxsize=16)
def model_of(family: str, size: str) -> Model:
    return Model(**preset(family, size))


def stack_of(row: Json) -> Stack:
    """Return the stack that prices a run: AutoModel; TorchTitan for a "framework" in lower case; else Megatron."""
    software = row["framework"]
    return AUTOMODEL if "AutoModel" in software else TORCHTITAN if software[0].islower() else MEGATRON


def run_of(row: Json) -> tuple[Config, Fold]:
    """Return a published run as a configuration and its degrees.

    What the row leaves out is filled in by one rule, which was written before anything was compared; no row has a
    parameter of its own. Microbatch: 1. Virtual stages: one layer each if the layers divide by pp and the microbatches
    by pp, else 1. etp: as tp, Megatron's default, or 1 where ep times that exceeds the stage. Recomputation: none.
    Dispatcher: all-to-all.
    """
    model, world, software = model_of(*row["preset"]), row["gpus"], row["framework"]
    tp, cp, pp, samples = row["tp"], row["cp"], row["pp"], row["mbs"] or 1
    dp = world // (tp * cp * pp)
    microbatches = row["gbs"] // (samples * dp)
    fine = model.num_layers // pp if model.num_layers % pp == 0 and microbatches % pp == 0 else 1
    stages = 1 if pp == 1 else row["vpp"] or fine
    if stages > 1 and (microbatches % pp or stages * pp > model.num_layers):
        stages = 1
    etp = row["etp"]
    if etp is None:
        etp = 1 if world // pp % (row["ep"] * tp) else tp
    words = (row["recompute"] or "").split(",")
    gathers_often = stack_of(row) is TORCHTITAN or "FSDP+EP" in software or software == "TRL"
    values = {
        "training.seq_len": row["seq"],
        "training.local_batch_size": samples,
        "training.global_batch_size": row["gbs"],
        "training.dtype": row.get("weights", "float32"),
        "training.mixed_precision_reduce": "bfloat16" if "Bridge" in software else "float32",
        "parallelism.pp": pp,
        "parallelism.dp_replicate": row.get("replicas", 1),
        "parallelism.cp": cp,
        "parallelism.tp": tp,
        "parallelism.experts.ep": row["ep"],
        "parallelism.experts.etp": etp,
        "parallelism.experts.edp_replicate": 1,
        "parallelism.reshard_after_forward": "always" if gathers_often else "never",
        "parallelism.reduce_once": not gathers_often,
        "pipeline.schedule": "Interleaved1F1B" if stages > 1 else "1F1B",
        "pipeline.virtual_stages": stages,
        "moe.dispatcher": "alltoall" if (row["dispatcher"] or "alltoall").startswith("alltoall") else "deepep",
        "activation_checkpoint.mode": next((MODES[word] for word in words if word in MODES), "none"),
    }
    if "LoRA" in software:
        values |= {"lora.rank": 16, "lora.experts_rank": 16}
    config = with_values(Config(model=model), values)
    return config, derive(world, config.parallelism)


def published_step(row: Json) -> float | None:
    """Return the seconds of a step of a published run; None if its source states neither time nor rate.

    The FLOPs of a stated rate count causal attention once, but in PAPER in full, as Megatron counted then.
    """
    if row["step_s"]:
        return row["step_s"]
    tokens = row["gbs"] * row["seq"]
    if row["tok_s_gpu"]:
        return tokens / row["tok_s_gpu"] / row["gpus"]
    if not row["tflops_per_gpu"]:
        return None
    model = model_of(*row["preset"])
    flops = flops_per_token(model, row["seq"])
    if row["source"].startswith(PAPER):
        flops += 3 * model.num_layers * model.num_heads * 2 * model.head_dim * row["seq"]
    return tokens * flops / (row["tflops_per_gpu"] * 1e12) / row["gpus"]


def price_of(row: Json, factors: Factors) -> Row:
    """Price a published run. Routing is even if ep is 1, it was forced or capacity drops the rest; else as learned."""
    (config, fold), stack = run_of(row), stack_of(row)
    forced = row["ep"] == 1 or any(word in (row["routing"] or "") for word in ("capacity", "balance"))
    imbalance = 1.0 if forced else stack.busiest
    price = Pricer(config, read_device(row["gpu"].lower()), factors, imbalance, stack).price(config, fold)
    return Row(row, published_step(row), stack, price, kind_of_mapping(fold, price), "split" in row)


def priced_rows(rows: list[Json], factors: Factors, comparable: bool = True) -> list[Row]:
    """Price the runs marked "comparable", or, if `comparable` is False, those with "not_judged".

    Runs of unknown models and runs whose length, batch or time is not stated are left out.
    """
    stated = (row for row in rows if "preset" in row and row["seq"] and row["gbs"] and published_step(row))
    wanted = (row for row in stated if (row["comparable"] if comparable else "not_judged" in row))
    return [price_of(row, factors) for row in wanted]


def fit(rows: list[Json]) -> Factors:
    """Fit the planner's factors to the calibration rows by least squares, and return them.

    Gauss-Newton on logarithms; residuals are the rows' errors and the factors' distances from their PRIOR.
    """
    rows = [row for row in rows if row.get("split") == "calibration"]
    start, spread = np.array([(log(guess), deviation) for guess, deviation in PRIOR.values()]).T

    def residuals(at: np.ndarray) -> np.ndarray:
        factors = Factors(**dict(zip(PRIOR, np.exp(at).tolist(), strict=True)))
        errors = [log(1 + price_of(row, factors).error) / NOISE for row in rows]
        return np.array([*errors, *((at - start) / spread)])

    at = start.copy()
    for _ in range(6):
        here = residuals(at)
        slopes = np.stack([(residuals(at + 0.02 * unit) - here) / 0.02 for unit in np.eye(len(PRIOR))], 1)
        at += np.clip(np.linalg.lstsq(slopes, -here, rcond=None)[0], -0.3, 0.3)
    return Factors(**{key: float(f"{exp(x):.3g}") for key, x in zip(PRIOR, at, strict=True)})


# ---- the accuracy of step times

SOURCES: dict[str, Callable[[Json], bool]] = {
    "Folding paper: FSDP + EP": lambda row: row["framework"] == "FSDP+EP" and row["id"][:3] == "mpf",
    "Folding paper: TP + EP + DP (experts sharded by etp)": lambda row: row["framework"] == "TP+EP+DP",
    "Folding paper: pipelines, unfolded and folded": lambda row: row["id"].startswith("mpf") and row["pp"] > 1,
    "Megatron model zoo": lambda row: "ModelZoo" in row["source"],
    "Megatron Bridge: Qwen3-30B": lambda row: "qwen30b" in row["id"] and "Bridge" in row["framework"],
    "Megatron Bridge: gpt-oss": lambda row: "gpt-oss" in row["id"] or "later-gptoss" in row["id"],
    "AutoModel (FSDP2)": lambda row: "AutoModel" in row["framework"],
    "TorchTitan, 8 H200 (fit)": lambda row: row["framework"] == "torchtitan",
    "prime-rl, LoRA under FSDP2 (fit)": lambda row: "prime-rl" in row["framework"],
}


def quantile(values: list[float], fraction: float) -> float:
    """Return the element of `values` below which this fraction of them is."""
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def by_source(priced: list[Row], not_judged: list[Row]) -> list[Cells]:
    """Return the cells of a table with a row for each source: runs, and median, mean and worst error.

    Runs that fitted something count only in sources named "(fit)". Then come all rows that fitted nothing, and each
    reason of `not_judged`. The median is that of absolute errors.
    """
    errors = {
        name: [one.error for one in priced if belongs(one.row) and ("fit" in name or not one.fitted)]
        for name, belongs in SOURCES.items()
    }
    errors["all rows that were not used in the fit"] = [one.error for one in priced if not one.fitted]
    for one in not_judged:
        errors.setdefault(f"not judged: {one.row['not_judged']}", []).append(one.error)
    return [
        (name, f"{len(x)}", f"{median(map(abs, x)):.0%}", f"{mean(x):+.0%}", f"{max(x, key=abs):+.0%}")
        for name, x in errors.items()
    ]


def ranges(priced: list[Row], not_judged: list[Row]) -> dict[str, float]:
    """Return the absolute error that four of five published runs do not exceed, by kind of mapping.

    Runs that fitted something count too. Of `not_judged`, launch-bound runs count too: no plan knows the host either.
    """
    errors = defaultdict(list)
    for one in priced + [one for one in not_judged if one.kind == "launch-bound"]:
        errors[one.kind].append(abs(one.error))
    return {kind: quantile(errors[kind], 0.8) for kind in sorted(errors)}


def order(priced: list[Row]) -> tuple[list[tuple[float, float]], list[bool], float]:
    """Compare how the planner orders mappings of one model, batch and world with the order that the paper published.

    Runs that fitted something count too; runs of other sources than the paper do not.

    Returns for each two mappings the longer published step over the other, as published and as planned; for each model,
    batch and world whether the planner names the fastest; and the error of ratios that four of five do not exceed.
    """
    groups = defaultdict(list)
    for one in priced:
        if one.row["source"].startswith(PAPER):  # one release of one software
            groups[tuple(one.row[key] for key in ("model", "gpus", "gbs"))].append(one)
    sets = [sorted(group, key=lambda one: one.published) for group in groups.values()]
    sets = [group for group in sets if len({one.price.step for one in group}) > 1]
    twos = (two for group in sets for two in combinations(group, 2) if two[0].published < two[1].published)
    pairs = [(b.published / a.published, b.price.step / a.price.step) for a, b in twos]
    fastest = [group[0] is min(group, key=lambda one: one.price.step) for group in sets]
    return pairs, fastest, quantile([abs(planned / published - 1) for published, planned in pairs], 0.8)


def table_of(head: Cells, body: list[Cells]) -> list[str]:
    rows = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    return [rows[0], "|" + "---|" * len(head), *rows[1:], ""]


def json_lines(rows: Iterable[Json]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def every_row(priced: list[Row]) -> str:
    """Return the text of docs/planner_rows.jsonl: a line for each run, with published and planned seconds of a step."""
    return json_lines(
        {
            "row": one.row["id"],
            "published, s": f"{one.published:.2f}",
            "planned, s": f"{one.price.step:.2f}",
            "error": f"{one.error:+.0%}",
            "kind of mapping": one.kind,
            "stack": one.stack.name,
            "after matrix work": one.price.bottleneck,
            "fitted": "yes" * one.fitted,
            "not judged": one.row.get("not_judged", ""),
        }
        for one in priced
    )


def accuracy(priced: list[Row], not_judged: list[Row]) -> str:
    """Return the text for docs/planner.md on the accuracy of step times: of judged runs, and of those `not_judged`."""
    unfitted = [one for one in priced if not one.fitted]
    (pairs, fastest, error), unfitted_ranges = order(priced), ranges(unfitted, not_judged)
    body = [
        (kind, f"{x:.0%}", f"{unfitted_ranges[kind]:.0%}" if kind in unfitted_ranges else "no run")
        for kind, x in ranges(priced, not_judged).items()
    ]
    wrong = [(published - 1, 1 / planned - 1) for published, planned in pairs if planned <= 1]
    text = (
        f"Order of the paper's mappings of one model, batch and number of GPUs: the planner names the fastest in "
        f"{sum(fastest)} of {len(fastest)} groups, and the faster of two in {len(pairs) - len(wrong)} of {len(pairs)} "
        f"pairs. Four of five ratios of two steps are within {error:.0%} of the published ones "
        f"({order(unfitted)[2]:.0%} without runs that fitted a figure): smaller gains are ties."
    )
    if wrong:
        paper, plan = (" and ".join(f"{x:.0%}" for x in side) for side in zip(*wrong, strict=True))
        text += f" The wrong pairs differ by {paper} in the paper, and by {plan} in the opposite order in the plan."
    lines = ["", *table_of(("source", "rows", "median error", "mean", "worst"), by_source(priced, not_judged))]
    lines += [*wrap(text, 120), "", "Four of five published step times are within this error of the planned one:", ""]
    return "\n".join([*lines, *table_of(("kind of mapping", "error", "without fitted runs"), body)]) + "\n"


# ---- the memory of published runs

MEASURES = {"Megatron-Bridge": "allocated", "torchtitan": "reserved", "prime-rl": "reserved", "TRL": "not stated"}
"""Bytes whose peak a published figure is, by software: allocated or reserved ones. Megatron Bridge says so of one run,
in its page of MoE optimization. The unit is 1e9 bytes, of reserved bytes 2**30."""
SAVED_ALIKE = (None, "none", "core_attn", "full")
"""Recomputation that saves what a mode of titanmoe saves; attention's kernels recompute their scores anyway."""


def published_peaks(rows: list[Json]) -> list[tuple[Json, str, float, int]]:
    """Return (row, a value of MEASURES, published bytes, planned bytes) of each published peak that can be compared.

    These are of known models with recomputation in SAVED_ALIKE; runs with the same two figures count once. The planned
    bytes are those of the fullest rank.
    """
    peaks = {}
    for row in rows:
        if row["peak_mem_gib"] and "preset" in row and row["recompute"] in SAVED_ALIKE:
            measures = next(words for software, words in MEASURES.items() if row["framework"].startswith(software))
            published = row["peak_mem_gib"] * (2**30 if measures == "reserved" else 1e9)
            planned = max(rank.peak for rank in rank_memories(*run_of(row)))
            peaks.setdefault((published, planned), (row, measures, published, planned))  # one of two kinds of GPU
    return list(peaks.values())


def published_memory(rows: list[Json]) -> str:
    """Return the text for docs/planner.md on the memory of published runs."""
    body, errors = [], defaultdict(list)
    for row, measures, published, planned in published_peaks(rows):
        errors[measures].append(error := planned / published - 1)
        body.append((row["id"], measures, format_bytes(published), format_bytes(planned), f"{error:+.1%}"))
    lines = ["", *table_of(("run", "measures", "published", "planned", "error"), body)]
    for measures, values in {"all": [error for some in errors.values() for error in some], **errors}.items():
        lines += [f"* {measures}: {len(values)} rows, median {median(map(abs, values)):.1%}, mean {mean(values):+.1%}"]
    return "\n".join([*lines, "", ""])


# ---- the memory of shipped recipes, planned and rehearsed

MEMORY_HEAD = ("recipe", "pipeline rank", "planned", "rehearsed", "error")


def planned_peaks(name: str) -> tuple[Config, Fold, dict[int, int]]:
    """Plan the peak memory of a shipped recipe under its own mapping.

    Returns the config, the degrees, and the planned bytes of the first, last and fullest pipeline ranks, by pipeline
    rank.
    """
    from titanmoe.rehearse.rehearsal import recipe_to_rehearse  # only here, because it takes torch seconds to start

    path = str(find_recipe(name))
    world = recipe_ranks(read_draft([path], COMPONENTS))
    config = recipe_to_rehearse(["--config", path], world, "h100")
    fold = derive(world, config.parallelism)
    peaks = [rank.peak for rank in rank_memories(config, fold)]
    return config, fold, {i: peaks[i] for i in sorted({0, fold.pp - 1, peaks.index(max(peaks))})}


def read_memory() -> list[Cells]:
    return [tuple(json.loads(line).values()) for line in MEMORY.read_text(encoding="utf-8").splitlines()]


def recipes_with_sizes() -> list[str]:
    """Return the shipped recipes but those whose sizes are in the model that scripts/make_small_model.py makes."""
    return [name for name in shipped_recipes() if name not in ("sft_debug", "dpo_debug")]


def memory_rows(recipes: list[str]) -> list[Cells]:
    """Rehearse recipes and print and return a row of cells, as in MEMORY_HEAD, for each rehearsed rank.

    Of recipes not in `recipes`, unless that is [], the rows are read from docs/.
    """
    from titanmoe.rehearse.rehearsal import rehearse

    old_rows, rows = read_memory(), []
    for name in recipes_with_sizes():
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


def memory_table(rows: list[Cells]) -> str:
    """Return the table of docs/planner.md: of each recipe for GPUs the rank whose rehearsed memory is largest."""
    for_gpus = sorted((row for row in rows if "debug" not in row[0]), key=lambda row: float(row[3].removesuffix(" GB")))
    fullest = dict(sorted({row[0]: row for row in for_gpus}.items()))
    return "\n".join(table_of(MEMORY_HEAD, list(fullest.values())))


# ---- what folding gains

LONG = 131072
FOLDING_HEAD = ("recipe", "setting", "GPUs", "fastest: attention / experts", "fastest unfolded", "takes longer by")


def long_samples(config: Config, ranks: int) -> list[str]:
    training = config.training
    samples = max(ranks // 8, training.global_batch_size * training.seq_len // LONG)
    values = {"seq_len": LONG, "local_batch_size": 1, "global_batch_size": samples}
    return ["--moe.overlap=none", *(f"--training.{key}={value}" for key, value in values.items())]


SETTINGS: dict[str, Callable[[Config, int], tuple[list[str], int]]] = {
    "as it is": lambda config, ranks: ([], ranks),
    "4 x the GPUs": lambda config, ranks: ([], 4 * ranks),
    "128K tokens": lambda config, ranks: (long_samples(config, ranks), ranks),
}
"""Changes to a recipe and its number of GPUs: the same batch on more of them, and samples of 128K tokens."""


def folding_gains() -> list[Json]:
    """Find and print the fastest mapping and the fastest unfolded one on H100s of each recipe for GPUs and setting.

    Returns:
        A dict for each: "recipe", "setting", "ranks", "changed" (the setting's options); and "best" and "unfolded", if
            any fits, with the mapping's options by path, its "kind" and its "seconds" per step.
    """
    gains = []
    for name in (name for name in shipped_recipes() if "debug" not in name):
        config = recipe(name)
        for setting, change in SETTINGS.items():
            changed, ranks = change(config, recipe_ranks(read_draft([str(find_recipe(name))], COMPONENTS)))
            result = search(recipe(name, changed), ranks, read_device("h100"), Factors(), count=1)
            mappings = {"best": result.best[0] if result.best else None, "unfolded": result.best_unfolded}
            fastest = {
                kind: {"seconds": one.price.step, "kind": kind_of_mapping(one.fold, one.price)} | overrides(one)
                for kind, one in mappings.items()
                if one
            }
            gains.append({"recipe": name, "setting": setting, "ranks": ranks, "changed": changed} | fastest)
            print(*folding_cells(gains[-1]), flush=True)
    return gains


def recipe(name: str, changed: Sequence[str] = ()) -> Config:
    return load(["--config", str(find_recipe(name)), *changed], COMPONENTS, lambda config: [])


CHOSEN = (
    "training.local_batch_size",
    *(DEGREE_PATHS[name] for name in ("pp", "dp_replicate", "cp", "tp", "edp_replicate", "ep", "etp")),
    *("pipeline.schedule", "pipeline.virtual_stages", "activation_checkpoint.mode", "moe.dispatcher", "moe.overlap"),
    "parallelism.reshard_after_forward",
)
"""Options that say which mapping the search chose."""


def overrides(mapping: PricedMapping) -> Json:
    degrees = {path: getattr(mapping.fold, name) for name, path in DEGREE_PATHS.items()}
    values = flatten(mapping.config) | degrees
    return {path: values[path] for path in CHOSEN}


def gain(row: Json) -> float:
    """Return how much longer the fastest unfolded mapping takes than the fastest, such as 0.1; `row` has both."""
    return row["unfolded"]["seconds"] / row["best"]["seconds"] - 1


def verdict(row: Json) -> str:
    if "best" not in row:
        return "nothing fits"
    if "unfolded" not in row:
        return "no unfolded mapping fits"
    longer = 1 + gain(row)
    if longer <= 1 + TIE:
        return f"{longer - 1:.0%}, " + ("a tie" if longer > 1.005 else "the same")
    return f"{longer - 1:.0%} ({longer / (1 + TIE) - 1:.0%} to {longer / (1 - TIE) - 1:.0%})"


def folding_cells(row: Json) -> Cells:
    def mapping(kind: str) -> str:
        if kind not in row:
            return "-"
        chosen = row[kind]
        attention = [f"{axis} {n}" for axis in ("pp", "cp", "tp") if (n := chosen[f"parallelism.{axis}"]) > 1]
        experts = [f"{axis} {n}" for axis in ("ep", "etp") if (n := chosen[f"parallelism.experts.{axis}"]) > 1]
        return f"{' '.join(attention) or '1'} / {' '.join(experts) or '1'}: {chosen['seconds']:.3g} s"

    return row["recipe"], row["setting"], f"{row['ranks']:,}", mapping("best"), mapping("unfolded"), verdict(row)


def folding_tables(gains: list[Json]) -> str:
    """Return two Markdown tables: what folding gains for each recipe, and the mappings with a gain above TIE.

    The second has also the recipes that no unfolded mapping fits.
    """
    by_recipe: dict[str, list[str]] = defaultdict(list)
    for row in gains:
        cell, _, words = verdict(row).partition(", ")
        by_recipe[row["recipe"]].append({"the same": "-", "a tie": f"tie ({cell})"}.get(words, cell))
    large = [folding_cells(row) for row in gains if "best" in row and ("unfolded" not in row or gain(row) > TIE)]
    lines = table_of(("recipe", *SETTINGS), [(name, *cells) for name, cells in by_recipe.items()])
    return "\n".join([*lines, "The mappings where folding gains more than a tie:", "", *table_of(FOLDING_HEAD, large)])


# ---- the pages


def write_marked(page: Path, option: str, *texts: str) -> None:
    """Replace what stands on a page between each mark "from here: ... planner_page.py OPTION" and the next "to here".

    Args:
        page: the file, which is rewritten.
        option: the option in the mark; "" for the mark without one.
        texts: the new text for each such mark, in order, with a line break at its end; ValueError for another number.
    """
    mark, end = f"<!-- from here: {f'python scripts/planner_page.py {option}'.strip()} -->\n", "<!-- to here -->\n"
    page.write_text(replace_marked(page.read_text(encoding="utf-8"), mark, end, *texts), encoding="utf-8")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work = parser.add_mutually_exclusive_group()
    work.add_argument("--fit", action="store_true", help="print what the calibration rows give")
    work.add_argument("--memory", nargs="*", metavar="RECIPE", help="rehearse these recipes, or all")
    work.add_argument("--folding", action="store_true", help="write what folding gains into docs/folding.md")
    args = parser.parse_args(words)
    if unknown := set(args.memory or ()) - {*recipes_with_sizes()}:
        parser.error(f"--memory: {min(unknown)} is no recipe with sizes: use {', '.join(recipes_with_sizes())}")
    if args.folding:
        gains = folding_gains()
        FOLDING.write_text(json_lines(gains), encoding="utf-8")
        write_marked(FOLDING_PAGE, "--folding", "\n" + folding_tables(gains) + "\n")
    elif args.memory is not None:
        rows = memory_rows(args.memory)
        MEMORY.write_text(json_lines(dict(zip(MEMORY_HEAD, row, strict=True)) for row in rows), encoding="utf-8")
        write_marked(PAGE, "--memory", "\n" + memory_table(rows) + "\n")
    elif args.fit:
        print(json.dumps(asdict(fit(read_rows()))))
    else:
        rows = read_rows() + read_rows(LATER)
        priced = priced_rows(rows, Factors())
        not_judged = priced_rows(rows, Factors(), comparable=False)
        write_marked(PAGE, "", accuracy(priced, not_judged), published_memory(rows))
        EVERY.write_text(every_row(priced + not_judged), encoding="utf-8")


if __name__ == "__main__":
    main()
