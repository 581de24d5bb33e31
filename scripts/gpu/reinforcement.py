"""Run reinforcement learning on one device: a small model learns sums, and real layers generate and learn.

    python scripts/gpu/reinforcement.py [--device cuda|cpu] [--json FILE] [--only NAME ...]

    sums       scripts/sums.py: mean reward below 0.3 in the first 20 steps, above 0.8 in the last 20
    qwen3      steps of six layers of Qwen3-30B-A3B with 16 experts: seconds of completions and of learning
    offload    the same with generation.offload_training: loss, norm, reward and mismatch equal to the bit

Real layers complete 32 prompts 16 times in each step, with 128 tokens; for `offload` 8 prompts, with 16 tokens. On CPUs
the layers are tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rows import Rows

ROOT = Path(__file__).resolve().parents[2]
ALONE = [
    "--job.ranks",
    "1",
    "--parallelism.tp",
    "1",
    "--parallelism.experts.ep",
    "1",
    "--generation.parallelism.ep",
    "1",
]
LAYERS = {
    "job.ranks": 1,
    "model.family": "qwen3_moe",
    "model.size": "30b_a3b",
    "model.num_layers": 6,
    "model.num_experts": 16,
    "rl.reward": "regex",
    "rl.prompts": "prompts.jsonl",
    "rl.prompts_per_step": 32,
    "rl.completions": 16,
    "generation.max_tokens": 128,
    "generation.batch_size": 256,
    "training.steps": 4,
    "training.seq_len": 1024,
    "training.local_batch_size": 16,
    "checkpoint.enable": "false",
    "optimizer.lr": 1e-6,
}
TINY = {
    "model.dim": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 16,
    "model.expert_hidden": 32,
    "model.vocab_size": 512,
    "model.num_layers": 2,
    "rl.prompts_per_step": 2,
    "rl.completions": 4,
    "generation.max_tokens": 8,
    "training.seq_len": 128,
}
SUMMED = ("rl.generate_s", "rl.length", "time.forward_backward", "time.optimizer", "tokens")
COMPARED = ("loss", "grad_norm", "rl.reward", "policy.mismatch", "policy.entropy")


def command(folder: Path, *words: str) -> str:
    """Run Python with these words in a folder; print and return stdout and stderr. RuntimeError if it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout[-20_000:], flush=True)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-1500:]}")
    return done.stdout


def sums(device: str) -> dict[str, Any]:
    """Teach sums by rewards and return under "note" a text with the mean reward of each 20 steps.

    Raises RuntimeError if the rewards do not rise as scripts/sums.py asks for.
    """
    with tempfile.TemporaryDirectory() as folder:
        precision = ["--training.mixed_precision_param", "bfloat16" if device == "cuda" else "float32"]
        log = command(
            Path(folder), f"{ROOT}/scripts/sums.py", "--seeds", "0", *ALONE, "--training.device", device, *precision
        )
        return {"note": f"mean rewards {' '.join(log.splitlines()[-1].split()[3:])}"}


def config_of(device: str) -> dict[str, Any]:
    return LAYERS | (TINY if device == "cpu" else {})


def steps(device: str, *options: str) -> list[dict[str, Any]]:
    """Run steps of real layers and return the metrics of each; `options` are further words of `titanmoe train`."""
    changes = config_of(device) | {"training.device": device, "job.name": "layers"}
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        prompts = [{"prompt": f"{number} is the number " * 4, "solution": "^[a-z]"} for number in range(64)]
        Path(folder, "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        command(Path(folder), "-m", "titanmoe", "train", *words, *options)
        return [json.loads(line) for line in Path(folder, "runs/layers/metrics.jsonl").read_text().splitlines()]


def speed(device: str) -> dict[str, Any]:
    """Return figures of a step of real layers by name: means without the first step, maxima of memory and mismatch."""
    lines, config = steps(device), config_of(device)
    completions = config["rl.prompts_per_step"] * config["rl.completions"]
    mean = {key: sum(line[key] for line in lines[1:]) / (len(lines) - 1) for key in SUMMED}
    return {
        "s of completions": mean["rl.generate_s"],
        "tokens/s of completions": completions * mean["rl.length"] / mean["rl.generate_s"],
        "s of learning": mean["time.forward_backward"] + mean["time.optimizer"],
        "tokens": mean["tokens"],
        "GiB at most": max(line["memory_gib"] for line in lines),
        "mismatch": max(line["policy.mismatch"] for line in lines),
        "largest mismatch": max(line["policy.mismatch_max"] for line in lines),
    }


def offload(device: str) -> dict[str, Any]:
    """Compare two steps of real layers with and without generation.offload_training; return figures of the run with it.

    Raises ValueError if a metric of COMPARED differs.
    """
    short = ("--training.steps", "2", "--rl.prompts_per_step", "8", "--generation.max_tokens", "16")
    deterministic = (*short, "--training.deterministic", "true")
    resident, offloaded = (
        steps(device, *deterministic),
        steps(device, *deterministic, "--generation.offload_training", "true"),
    )
    for one, other in zip(resident, offloaded, strict=True):
        if differ := [f"{key} {one[key]!r} and {other[key]!r}" for key in COMPARED if one[key] != other[key]]:
            raise ValueError(f"step {one['step']} without and with offload_training: {', '.join(differ)}")
    return {
        "GiB at most": offloaded[-1]["memory_gib"],
        "s of completions": offloaded[-1]["rl.generate_s"],
        "steps": len(offloaded),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    checks = {"sums": sums, "qwen3": speed, "offload": offload}
    parser.add_argument("--only", nargs="+", choices=checks, default=list(checks), help="these checks alone")
    args = parser.parse_args()
    rows = Rows(args.json)
    for name in args.only:
        rows.check(name, lambda name=name: checks[name](args.device))
    return rows.status()


if __name__ == "__main__":
    sys.exit(main())
