"""Time a step on pairs of completions, and its memory, with the prompt stored twice and once, on this machine's CPU.

    python scripts/bench/shared_prefix.py [--text 1024] [--pairs 2] [--steps 3]

Prompts are 3/4 of a text. Each layout runs in a process of its own, on one rank. CPU time is that of the median step,
after an untimed one; memory is the peak of the process over that before the first step. B samples, S positions.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from titanmoe.data.batch import Batch  # noqa: E402
from titanmoe.mask import branches  # noqa: E402
from titanmoe.tokens import IGNORE  # noqa: E402

SHAPE = "--model.family qwen3_moe --model.size debug --model.vocab_size 4096 --model.dim 512 --model.expert_hidden 256"
SHAPE += " --model.head_dim 64 --training.device cpu --data.source synthetic --checkpoint.enable false"
LAYOUTS = {"copies": "two copies of the prompt", "shared": "one prompt"}


def batch(text: int, pairs: int, layout: str) -> Batch:
    """Return a batch of one sample with pairs of completions, without padding, in a layout of `LAYOUTS`.

    Tokens are random and the same in each layout and call; only completions have labels. `text` is the number of tokens
    of a prompt and one completion.
    """
    draw = np.random.default_rng(0)
    stem, completion = 3 * text // 4 - 1, text // 4 + 1  # each completion repeats the prompt's last token
    lengths = [[stem, completion, completion]] * pairs if layout == "shared" else [[stem, completion]] * (2 * pairs)
    tokens, labels = [], []
    for _ in range(pairs):
        prompt, *completions = (draw.integers(0, 4096, n) for n in (stem, completion + 1, completion + 1))
        for n, ids in enumerate(completions):
            ids[0] = completions[0][0]
            prompts = [prompt] * (n == 0 or layout == "copies")
            tokens += [*prompts, ids[:-1]]
            labels += [*(np.full(stem, IGNORE) for _ in prompts), ids[1:]]
    until, depth = branches(np.array(lengths))
    fields = (torch.from_numpy(x).unsqueeze(0) for x in (np.concatenate(tokens), np.concatenate(labels), depth, until))
    ids, labels_BS, depth_BS, until_BS = fields
    return Batch(ids, labels_BS, torch.ones_like(ids, dtype=torch.bool), position_BS=depth_BS, until_BS=until_BS)


class Repeated:
    """Stand-in for the data loader that returns one batch again and again."""

    def __init__(self, given: Batch):
        self.batches, self.global_batch_size, self.microbatches = [given], 1, 1

    def peek(self) -> list[Batch]:
        return self.batches

    next_step = peek


def measure(layout: str, text: int, pairs: int, steps: int) -> None:
    """Train some steps with a layout, and print as JSON the tokens, labels, first loss, median CPU seconds and MiB.

    `text` and `pairs` are those of `batch`; every step repeats the batch, and one more, the first, is not timed.
    """
    from titanmoe.components import COMPONENTS
    from titanmoe.train.build import build_training
    from titanmoe.train.launch import read_config
    from titanmoe.train.runtime import start, stop
    from titanmoe.train.trainer import Trainer

    given = batch(text, pairs, layout)
    sizes = ["--training.seq_len", str(given.tokens_BS.shape[1]), "--training.local_batch_size", "1"]
    config = read_config([*SHAPE.split(), *sizes, "--training.global_batch_size", "1"], 1, COMPONENTS)
    trainer = Trainer(build_training(config, start(config), loader=lambda *args: Repeated(given)))
    before, times, loss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [], 0.0
    for step in range(steps + 1):
        began = time.process_time()
        report = trainer.train_step()
        times += [time.process_time() - began] * (step > 0)
        loss = loss or report["loss"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    labels = int((given.labels_BS != IGNORE).sum())
    about = {"tokens": given.tokens_BS.shape[1], "labels": labels, "loss": loss}
    print(json.dumps(about | {"seconds": median(times), "MiB": peak / 1024}), flush=True)
    stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=int, default=1024, help="tokens of a prompt and a completion")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.text, args.pairs, args.steps = 16, 1, 1
    if args.layout:
        return measure(args.layout, args.text, args.pairs, args.steps)
    print("| | tokens | labels | first loss | CPU time of a step | memory |\n|---|---|---|---|---|---|")
    for layout, name in list(LAYOUTS.items())[args.tiny :]:  # the second alone, if tiny
        command = [sys.executable, __file__, *sys.argv[1:], "--layout", layout]
        row: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        figures = f"{row['loss']:.6f} | {row['seconds']:.2f} s | {row['MiB']:,.0f} MiB"
        print(f"| {name} | {row['tokens']:,} | {row['labels']:,} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
