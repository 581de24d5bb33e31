"""Compare AdamW and Muon on the debug corpus by tokens until the loss reaches a target, each tuned by the same sweep.

    python scripts/bench/optimizers.py            run what docs/optimizers.jsonl lacks, then write table and plot
    python scripts/bench/optimizers.py --tiny     one run of two steps: checks that it runs, writes nothing

5 rates x 3 seeds for each optimizer: train_configs/debug.toml on one CPU rank, 60 steps of 2,048 tokens, a minute each.
The loss of a step is the mean over it and the four before. An optimizer's best rate is the one with the fewest tokens
to the target in the median over seeds; a run that does not reach it counts as infinite, as in AlgoPerf.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from titanmoe.config.fields import replace_marked  # noqa: E402
from titanmoe.report.charts import Curve, curves_chart  # noqa: E402
from titanmoe.report.draw import LIGHT, svg  # noqa: E402

PAGE, ROWS = ROOT / "docs" / "optimizers.md", ROOT / "docs" / "optimizers.jsonl"
BEGIN, END = "<!-- from here: python scripts/bench/optimizers.py -->", "<!-- to here -->"
TARGETS = (3.0, 2.6)
OPTIMIZERS, RATES, SEEDS = ("adamw", "muon"), (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2), (0, 1, 2)
STEPS, BATCH, LENGTH = 60, 8, 256
COMMON = f"--training.steps {STEPS} --training.global_batch_size {BATCH} --training.device cpu --parallelism.tp 1"
COMMON += " --parallelism.experts.ep 1 --checkpoint.enable false --validation.interval 0 --metrics.tensorboard false"


def read() -> list[dict]:
    """Return a dict with "optimizer", "lr", "seed" and "loss" (of each step) for each run that has been made so far."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def losses(optimizer: str, rate: float, seed: int, *options: str) -> list[float]:
    """Train the debug model in a process of its own, and return the loss of each step, to 4 decimals.

    `rate` is optimizer.lr; `options` are further words of the command line.
    """
    with tempfile.TemporaryDirectory() as folder:
        varied = f"--optimizer.name {optimizer} --optimizer.lr {rate} --training.seed {seed} --job.dump_folder {folder}"
        command = [
            sys.executable,
            "train.py",
            "--config",
            "train_configs/debug.toml",
            *COMMON.split(),
            *varied.split(),
            *options,
        ]
        subprocess.run([*command, "--job.name", "run"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [round(json.loads(line)["loss"], 4) for line in lines]


def run() -> None:
    """Train each optimizer at each rate and seed unless ROWS has the result; append each result to ROWS."""
    done = {(row["optimizer"], row["lr"], row["seed"]) for row in read()}
    for seed, rate, optimizer in product(SEEDS, RATES, OPTIMIZERS):
        if (optimizer, rate, seed) not in done:
            row = {"optimizer": optimizer, "lr": rate, "seed": seed, "loss": losses(optimizer, rate, seed)}
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")


def steps_to(target: float, losses: list[float]) -> float:
    """Return the number of steps until the smoothed loss (`smooth`) is at most `target`; infinite if it never is."""
    return next((step for step, loss in enumerate(smooth(losses), 1) if loss <= target), math.inf)


def smooth(losses: list[float]) -> list[float]:
    """Return for each step the mean loss over it and the four before, or as many as there are."""
    return [sum(window) / len(window) for end in range(1, len(losses) + 1) if (window := losses[max(0, end - 5) : end])]


def table(rows: list[dict]) -> str:
    """Return a Markdown table of each optimizer and rate: tokens to each loss of TARGETS, and the loss after 60 steps.

    Each is the median over seeds with the range. `rows` are the records of runs, with a loss per step.
    """

    def cell(values: list[float], form: str) -> str:
        texts = ["never" if math.isinf(v) else format(v, form) for v in (median(values), min(values), max(values))]
        return texts[0] if texts[1] == texts[2] else f"{texts[0]} ({texts[1]} to {texts[2]})"

    head = ["optimizer", "rate", *(f"tokens to {target}" for target in TARGETS), "loss after 60 steps"]
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for optimizer, rate in product(OPTIMIZERS, RATES):
        runs = [row["loss"] for row in rows if (row["optimizer"], row["lr"]) == (optimizer, rate)]
        tokens = [cell([BATCH * LENGTH * steps_to(target, run) for run in runs], ",.0f") for target in TARGETS]
        cells = [optimizer, f"{rate:g}", *tokens, cell([smooth(run)[-1] for run in runs], ".2f")]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def best(rows: list[dict], optimizer: str) -> float:
    """Return the optimizer's lowest rate with the fewest tokens to the last target, in the median over seeds."""

    def tokens(rate: float) -> float:
        some = [row["loss"] for row in rows if (row["optimizer"], row["lr"]) == (optimizer, rate)]
        return median(steps_to(TARGETS[-1], losses) for losses in some)

    return min(RATES, key=tokens)


def plot(rows: list[dict]) -> str:
    """Return an SVG of the smoothed loss by tokens at each optimizer's best rate, as the median of the seeds."""
    curves, tokens = [], [float(BATCH * LENGTH * step) for step in range(1, STEPS + 1)]
    for color, optimizer in enumerate(OPTIMIZERS):
        rate = best(rows, optimizer)
        runs = [smooth(row["loss"]) for row in rows if (row["optimizer"], row["lr"]) == (optimizer, rate)]
        middle = [median(losses) for losses in zip(*runs, strict=True)]
        curves.append(Curve(f"{optimizer}, rate {rate:g}", tokens, middle, f"c{color}"))
    sheet = curves_chart("Loss by tokens", "nats per byte", curves, size=(720.0, 300.0))
    colours = ";".join(f"--{role}:{value}" for role, value in LIGHT.items())
    style = f"{colours};background:{LIGHT['card']};font-family:sans-serif"
    return svg(sheet, f' xmlns="http://www.w3.org/2000/svg" style="{style}"') + "\n"


def write(rows: list[dict]) -> None:
    """Write table and plot into docs/."""
    (ROOT / "docs" / "optimizers.svg").write_text(plot(rows))
    PAGE.write_text(replace_marked(PAGE.read_text(), BEGIN, END, f"\n\n{table(rows)}\n\n"))


def check() -> None:
    """Run two steps of the first optimizer; print the table and make the plot of runs that all have these losses."""
    short = ["--training.steps", "2", "--training.seq_len", "16", "--training.global_batch_size", "1"]
    loss = losses(OPTIMIZERS[0], RATES[0], SEEDS[0], *short, "--training.local_batch_size", "1")
    runs = product(OPTIMIZERS, RATES, SEEDS)
    rows = [
        {"optimizer": optimizer, "lr": rate, "seed": seed, "loss": loss * (STEPS // 2)}
        for optimizer, rate, seed in runs
    ]
    print(table(rows), len(plot(rows)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--tiny"]:
        check()
    else:
        run()
        write(read())
