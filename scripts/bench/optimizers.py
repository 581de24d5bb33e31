"""AdamW and Muon on the debug corpus, each tuned by the same sweep: tokens until the loss reaches a target.

    python scripts/bench/optimizers.py            run what docs/optimizers.jsonl lacks, then write table and plot

5 rates x 3 seeds for each optimizer: train_configs/debug.toml on one CPU rank, 60 steps of 2,048 tokens, a minute each.
The loss of a step is the mean over it and the four before. An optimizer's best rate is the one with the fewest tokens
to the target in the median over seeds; a run that does not reach it counts as infinite, as in AlgoPerf.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs" / "optimizers.jsonl"
OPTIMIZERS, RATES, SEEDS = ("adamw", "muon"), (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2), (0, 1, 2)
STEPS, BATCH, LENGTH = 60, 8, 256
COMMON = f"--training.steps {STEPS} --training.global_batch_size {BATCH} --training.device cpu --parallelism.tp 1"
COMMON += " --parallelism.experts.ep 1 --checkpoint.enable false --validation.interval 0 --metrics.tensorboard false"


def read() -> list[dict]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def losses(optimizer: str, rate: float, seed: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        own = f"--optimizer.name {optimizer} --optimizer.lr {rate} --training.seed {seed} --job.dump_folder {folder}"
        command = [sys.executable, "train.py", "--config", "train_configs/debug.toml", *COMMON.split(), *own.split()]
        subprocess.run([*command, "--job.name", "run"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [round(json.loads(line)["loss"], 4) for line in lines]


def run() -> None:
    done = {(row["optimizer"], row["lr"], row["seed"]) for row in read()}
    for seed, rate, optimizer in product(SEEDS, RATES, OPTIMIZERS):
        if (optimizer, rate, seed) not in done:
            row = {"optimizer": optimizer, "lr": rate, "seed": seed, "loss": losses(optimizer, rate, seed)}
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    run()
