"""Teach a small model sums by rewards alone, from an empty folder, and print how its mean reward rises.

    mkdir new && cd new && python ../scripts/sums.py [--seeds 0 1 2 3 4] [--replay off rollout] [--table.field value]

It takes two minutes per seed on 2 CPU cores, and as long for each further value of rl.replay. A first run of
train_configs/rl_debug.toml trains a new model on the format alone (SFT), with random digits as completions; a second
one rewards right answers. Other options go to the second, such as --rl.updates 2 for --replay old; options of [job],
[parallelism] and [training] go to both, such as --job.ranks 1 --parallelism.tp 1 --parallelism.experts.ep 1 on one GPU
(and --generation.parallelism.ep 1). Chance is 0.1, and so is a constant completion: each digit is right equally often.
The script fails unless each run's mean reward is below 0.3 in its first 20 steps and above 0.8 in its last 20.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from fine_tune import titanmoe
from make_small_model import ROOT

RECIPE = f"{ROOT}/train_configs/rl_debug.toml"
FORMAT, PROMPTS = Path("format.jsonl"), Path("prompts.jsonl")
EXAMPLES = 30_000
"""Lines of the format's file; none is seen twice."""
FOR_BOTH_RUNS = ("--job.", "--parallelism.", "--training.")
STEPS = 20
"""Steps that a mean is over."""


def sums() -> dict[str, int]:
    """Return solutions by prompt ("3+4=": 7): all sums and differences of digits that are digits, each 11 times."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return {f"{a}+{b}=": a + b for a, b in pairs if a + b < 10} | {f"{a}-{b}=": a - b for a, b in pairs if a >= b}


def write_files() -> None:
    """Write into the current folder PROMPTS, with solutions, and FORMAT: EXAMPLES random prompts with random digits."""
    solutions, draw = sums(), random.Random(0)
    records = [{"prompt": prompt, "solution": str(solution)} for prompt, solution in solutions.items()]
    texts = [{"text": f"{draw.choice([*solutions])}{draw.randrange(10)}"} for _ in range(EXAMPLES)]
    for file, lines in ((PROMPTS, records), (FORMAT, texts)):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def for_both_runs(options: list[str]) -> list[str]:
    """Return those words of `options` that set [job], [parallelism] or [training], each option with its value."""
    out, wanted = [], False
    for word in options:
        if word.startswith("--"):
            wanted = word.startswith(FOR_BOTH_RUNS)
        out += [word] * wanted
    return out


def learn_format(seed: int, options: list[str]) -> str:
    """Train a new model on the format in FORMAT; return the run's folder. Exit this process if the training fails.

    `seed` is training.seed; of the `options` of `titanmoe train` only those of `for_both_runs` are used.
    """
    words = [*for_both_runs(options), "--job.name", f"rl_format_{seed}", "--training.seed", str(seed)]
    words += ["--rl.reward=", "--rl.prompts=", "--checkpoint.load", "auto", "--checkpoint.model_only", "false"]
    titanmoe("train", RECIPE, *words, "--training.steps=-1", "--training.epochs", "1", "--optimizer.lr", "5e-3")
    return f"runs/rl_format_{seed}"


def learn_sums(name: str, seed: int, begin: str, options: list[str]) -> tuple[list[float], float]:
    """Train a model by rewards; return the mean reward of each full STEPS steps, and the run's seconds.

    Exit this process if the training fails.

    Args:
        name: the run's name.
        seed: training.seed, of the order of the prompts and of the completions.
        begin: folder of the run with the model to begin with.
        options: further options of `titanmoe train`.
    """
    started = time.monotonic()
    titanmoe("train", RECIPE, "--job.name", name, "--training.seed", str(seed), "--checkpoint.load", begin, *options)
    lines = map(json.loads, Path("runs", name, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    rewards = [line["rl.reward"] for line in lines if "rl.reward" in line]
    means = [sum(rewards[i : i + STEPS]) / STEPS for i in range(0, len(rewards) - STEPS + 1, STEPS)]
    return means, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run for each; default 0")
    parser.add_argument(
        "--replay",
        nargs="+",
        default=["rollout"],
        choices=["off", "old", "rollout"],
        help="a run of each seed for each value of rl.replay; default rollout",
    )
    parser.add_argument("--only-files", action="store_true", help=f"write {PROMPTS} and {FORMAT}, and train nothing")
    args, options = parser.parse_known_args()
    if not args.only_files and any(Path().iterdir()):
        print(f"sums.py: {Path().absolute()} is not empty: run it in a new folder", file=sys.stderr)
        return 2
    write_files()
    if args.only_files:
        return 0
    rows, learned = [], True
    for seed in args.seeds:
        begin = learn_format(seed, options)
        for replay in args.replay:
            means, seconds = learn_sums(f"sums_{seed}_{replay}", seed, begin, ["--rl.replay", replay, *options])
            learned &= bool(means) and means[0] < 0.3 and means[-1] > 0.8
            curve = " ".join(f"{mean:.2f}" for mean in means)
            rows.append(f"{seed:4}  {replay:7}  {seconds:7.0f}  {curve}")
    print(f"\nseed  replay   seconds  mean reward of each {STEPS} steps; chance is 0.10")
    print("\n".join(rows))
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
