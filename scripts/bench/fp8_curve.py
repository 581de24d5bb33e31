"""Compare the losses of one run in several precisions: the effect of the experts' matmuls in 8 bits.

    python scripts/bench/fp8_curve.py [--steps 200] [--json FILE]

A small model (train_configs/debug.toml: 4 blocks of 64, 8 experts of 128, 2 per token, the Python library's source as
data), 2,048 tokens per step, one rank. Runs: float32; bfloat16; bfloat16 with the experts' matmuls in 8 bits
("fp8_emulated": the roundings of moe.expert_dtype = "fp8", multiplied in float32, so that it runs anywhere); and
bfloat16 again with other initial weights and samples, the yardstick for a difference that matters. Losses are means
over the last tenth of the steps up to the one shown. It shows numerics at a small size, not speed or a large model.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
BASE = ["--config", str(ROOT / "train_configs/debug.toml"), "--parallelism.tp=1", "--parallelism.experts.ep=1"]
BASE += ["--training.seq_len=128", "--training.local_batch_size=16", "--training.global_batch_size=16"]
BASE += ["--checkpoint.enable=false"]
RUNS = {
    "float32": ["--training.mixed_precision_param=float32"],
    "bfloat16": ["--training.mixed_precision_param=bfloat16"],
    "fp8": ["--training.mixed_precision_param=bfloat16", "--moe.expert_dtype=fp8_emulated"],
    "other seed": ["--training.mixed_precision_param=bfloat16", "--training.seed=1"],
}


def mean(losses: list[float], end: int) -> float:
    """Return the mean of losses[end - n : end], with n a tenth of all steps but at least 1."""
    window = losses[max(0, end - max(1, len(losses) // 10)) : end]
    return sum(window) / len(window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="also write every loss here")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    smallest = ["--training.seq_len=16", "--training.local_batch_size=1", "--training.global_batch_size=1"]
    if args.tiny:
        args.steps = 4
    import torch

    from titanmoe.components import COMPONENTS
    from titanmoe.train.build import build_training
    from titanmoe.train.launch import read_config
    from titanmoe.train.runtime import start, stop
    from titanmoe.train.trainer import Trainer

    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.platform()}
    about["command"] = " ".join(["python", "scripts/bench/fp8_curve.py", *sys.argv[1:]])
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n", flush=True)
    extra_options = [
        f"--training.steps={args.steps}",
        f"--training.device={args.device}",
        *(smallest if args.tiny else []),
    ]
    configs = {name: read_config([*BASE, *options, *extra_options], 1, COMPONENTS) for name, options in RUNS.items()}
    runtime, curves = start(configs["float32"]), {}
    for name, config in configs.items():
        trainer, began = Trainer(build_training(config, runtime)), time.process_time()
        curves[name] = [trainer.train_step()["loss"] for _ in range(args.steps)]
        print(f"{name}: {time.process_time() - began:.0f} CPU-s", flush=True)
    stop()
    marks = [round(args.steps * i / 4) for i in range(1, 5)]
    print(f"{'step':<12}", *(f"{mark:>8}" for mark in marks))
    for name, losses in curves.items():
        print(f"{name:<12}", *(f"{mean(losses, mark):8.4f}" for mark in marks))
    if args.json:
        args.json.write_text(json.dumps(about | {"loss": curves}, indent=1))


if __name__ == "__main__":
    main()
