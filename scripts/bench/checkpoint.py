"""Time how long saving pauses training, asynchronous and synchronous, with about 1 GB of weights and moments.

    torchrun --standalone --nproc-per-node 2 scripts/bench/checkpoint.py [--rounds 3] [--config RECIPE] [--json FILE]

The modes alternate in one run. "blocked" is the time that a save pauses the training loop, "written after" the time
until it is on disk, "step" the time of a step while nothing is written, and "step beside" that of a step while the
writer works in the background. "check" is the time that the slowest rank takes to check that every number is finite.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from titanmoe.checkpoint import layout
from titanmoe.checkpoint import write_tensors as writing
from titanmoe.components import COMPONENTS
from titanmoe.train.build import build_training
from titanmoe.train.launch import read_config
from titanmoe.train.runtime import exit_now, start, stop, world_size
from titanmoe.train.trainer import Trainer

MODEL = [
    "--model.dim=512", "--model.num_layers=4", "--model.vocab_size=8192", "--model.num_heads=8", "--model.head_dim=64",
    "--model.expert_hidden=1408", "--model.num_kv_heads=8", "--data.source=synthetic", "--training.seq_len=64",
    "--training.mixed_precision_param=float32",
]  # fmt: skip
MODES = ("sync", "async")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind")
    parser.add_argument("--config", help="a recipe, instead of the model of 1 GB")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    model = [*MODEL, f"--parallelism.experts.ep={world_size()}"]
    if args.tiny:
        args.rounds = 1
        model += ["--model.dim=64", "--model.num_layers=1", "--model.vocab_size=256", "--model.expert_hidden=32"]
    if args.config:
        model = ["--config", args.config]
    config = read_config([*model, "--checkpoint.keep_last=1"], world_size(), COMPONENTS)
    runtime = start(config)
    folders = [tempfile.mkdtemp(prefix="titanmoe-bench-") if runtime.rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    folder = Path(folders[0])
    try:
        trainer = Trainer(build_training(config, runtime))
        with trainer.training.checkpoints.in_folder(folder):
            pass  # it remains the folder; inside, a signal would only ask training to end after a step
        figures = measure(trainer, args.rounds)
        if runtime.rank == 0:
            report(figures, args.json)
    finally:
        stop()
        if runtime.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def measure(trainer: Trainer, rounds: int) -> dict[str, dict[str, float]]:
    """Time `rounds` saves in both modes to checkpoints in the run's folder. Collective: all ranks train and save.

    Leaves the saver in the mode "async" and `describe_first_nonfinite` replaced by one that is timed.

    Returns median seconds on this rank by mode, "sync" and "async": "blocked", "written after" (since the save began)
    and "step beside" (0.0 if there was none); and under "all" the median seconds of "step" and "check", the
    checkpoint's size "gb", and the number of "ranks".
    """
    checkpoints = trainer.training.checkpoints
    saver = checkpoints.saver
    seconds: dict[str, dict[str, list[float]]] = {
        mode: {"blocked": [], "written after": [], "step beside": []} for mode in MODES
    }
    quiet, checks = [], []
    look, looks = writing.describe_first_nonfinite, []
    writing.describe_first_nonfinite = lambda tensors: looks.append(timed(lambda: look(tensors)))
    for _ in range(2):
        trainer.train_step()
    for _ in range(rounds):
        for mode, taken in seconds.items():
            for _ in range(3):
                quiet.append(timed(trainer.train_step))
            saver.options = SimpleNamespace(**vars(saver.options) | {"save": mode})
            began = time.monotonic()
            taken["blocked"].append(checkpoints._save())
            while is_writing(saver):
                taken["step beside"].append(timed(trainer.train_step))
            saver.wait()
            taken["written after"].append(time.monotonic() - began)
            if mode == "sync":  # beside training, the check would have only a part of a core
                checks.append(slowest(looks[-1]))
    folder = layout.newest_first(saver.folder)[0]
    size = sum(s.bytes for s in layout.read_manifest(folder).files.values())
    out = {
        mode: {name: statistics.median(times) if times else 0.0 for name, times in taken.items()}
        for mode, taken in seconds.items()
    }
    check = statistics.median(checks)
    return out | {
        "all": {
            "step": statistics.median(quiet),
            "check": check,
            "gb": size / 1e9,
            "ranks": trainer.training.runtime.world,
        }
    }


def is_writing(saver) -> bool:
    """Return whether any rank's saver is still writing. Collective over the world: ranks must take the same steps."""
    alive = torch.tensor(float(saver._thread is not None and saver._thread.is_alive()))
    dist.all_reduce(alive)
    return bool(alive)


def slowest(seconds: float) -> float:
    """Return the largest value over all ranks. Collective over the world."""
    most = torch.tensor(seconds)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def timed(step: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.monotonic()
    step()
    return time.monotonic() - began


def report(figures: dict[str, dict[str, float]], file: Path | None) -> None:
    """Print the figures that `measure` returned, and write them to a JSON file if one is given."""
    every = figures["all"]
    machine = f"torch {torch.__version__}, {platform.machine()}"
    print(f"{every['gb']:.2f} GB, {every['ranks']:.0f} ranks, step {every['step']:.3f} s; {machine}")
    print("save    blocked s  written after s  step beside s")
    for mode in MODES:
        f = figures[mode]
        print(f"{mode:<7} {f['blocked']:9.3f}  {f['written after']:15.3f}  {f['step beside']:13.3f}")
    print(f"check {every['check'] * 1e3:.2f} ms: {every['check'] / every['step']:.2%} of a step")
    print(f"async blocks {figures['async']['blocked'] / figures['sync']['blocked']:.1%} of what sync blocks")
    if file:
        file.write_text(json.dumps(figures | {"torch": torch.__version__, "command": " ".join(sys.argv)}, indent=1))


if __name__ == "__main__":
    main()
    exit_now(0)
