"""Run the debug recipe on whatever this machine has, with a summary at the end (`make train`).

    python scripts/quickstart.py [--table.field value ...]

The trainer never alters a mapping. This script picks one that fits the devices, prints it and passes it as overrides.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, exit_with, load
from titanmoe.config.schema import Config
from titanmoe.train.refusals import refusals

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "train_configs/debug.toml"
CPU_RANKS = 4


def overrides(config: Config, ranks: int) -> list[str]:
    """Return the options, as words "--TABLE.FIELD" and value in turn, that adapt the recipe to a number of ranks.

    They set ep to the largest divisor of the ranks that divides the experts, tp to 2 if 4 divides the ranks, else to 1,
    and a global batch near the recipe's that the data ranks share evenly. What the recipe has already is left out.
    """
    tp = 2 if ranks % 4 == 0 else 1
    wanted = {"parallelism.tp": tp, "parallelism.experts.ep": math.gcd(ranks, config.model.num_experts)}
    per_round = config.training.local_batch_size * ranks // tp
    rounds = max(1, round(config.training.global_batch_size / per_round))
    wanted["training.global_batch_size"] = rounds * per_round
    given = {
        "parallelism.tp": config.parallelism.tp,
        "parallelism.experts.ep": config.parallelism.experts.ep,
        "training.global_batch_size": config.training.global_batch_size,
    }
    return [word for key, value in wanted.items() if value != given[key] for word in (f"--{key}", str(value))]


def find_ranks(device: str) -> tuple[int, str]:
    """Return the number of ranks, one per GPU or else CPU_RANKS, and a line about the devices.

    `device` is "auto", "cpu" or "cuda".
    """
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if gpus:
        return gpus, f"{gpus} x {torch.cuda.get_device_name(0)}: one rank each"
    return CPU_RANKS, f"no GPU in use: {CPU_RANKS} ranks share {os.cpu_count()} CPU cores"


def configure(extra: list[str]) -> tuple[int, list[str], Config]:
    """Choose and print the number of ranks and a mapping for this machine; `extra` are the user's options.

    Returns the number of ranks, the options that this script adds to the user's, none of which it replaces, and the
    config with both. Raises ConfigError if that cannot run.
    """
    recipe = load(["--config", RECIPE], COMPONENTS, lambda config: [])
    asked = load(["--config", RECIPE, *extra], COMPONENTS, lambda config: [])
    ranks, devices = find_ranks(asked.training.device)
    print(f"devices   {devices}")
    mapping = overrides(recipe, ranks)
    chosen = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in extra}
    mapping = [
        word
        for key, value in zip(mapping[::2], mapping[1::2], strict=True)
        if key.removeprefix("--") not in chosen
        for word in (key, value)
    ]
    print(f"mapping   {' '.join(mapping) if mapping else 'as in the recipe'}")
    # A new run each time, and none that `titanmoe train debug` would go on with.
    added_options = {"job.name": "quickstart", "checkpoint.load": "none"}
    added = [
        *mapping,
        *(word for key, value in added_options.items() if key not in chosen for word in (f"--{key}", value)),
    ]
    return ranks, added, load(["--config", RECIPE, *added, *extra], COMPONENTS, lambda config: refusals(config, ranks))


def run(ranks: int, arguments: list[str]) -> int:
    """Run `titanmoe train` on RECIPE with further options; return its exit code, or 130 if the user interrupted it."""
    words = ["train", RECIPE, "--ranks", str(ranks), *arguments]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "train.py", "--config", RECIPE, *arguments]
    print(
        f"command   titanmoe {shlex.join(words)}\n          which does what this does: {shlex.join(torchrun)}",
        flush=True,
    )
    process = subprocess.Popen([sys.executable, "-m", "titanmoe", *words], cwd=ROOT)
    interrupted = False
    while True:
        try:
            code = process.wait()
            return 130 if interrupted and code else code
        except KeyboardInterrupt:
            interrupted = True  # the terminal interrupted titanmoe train too, which ends its ranks


def newest_run(config: Config, since: float) -> Path | None:
    """Return the newest folder of runs with the config's name that has written metrics since a time; None without one.

    `since` is in seconds since the epoch.
    """
    files = (ROOT / config.job.dump_folder).glob(f"{config.job.name}*/metrics.jsonl")
    return max((f.parent for f in files if f.stat().st_mtime >= since), key=lambda f: f.stat().st_mtime, default=None)


def summary(folder: Path, seconds: float, ranks: int, arguments: list[str]) -> str:
    """Return text on a finished run: loss, speed, files and commands to type next.

    `seconds` is how long the run took, `arguments` are its options after the recipe.
    """
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if not steps:
        return f"no step was finished; files in {folder}"
    first, last = steps[0], steps[-1]
    rate = statistics.median(step["tokens_per_s"] for step in steps[1:] or steps)
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    program = Path(sys.executable).parent / "tensorboard"
    tensorboard = program.relative_to(ROOT) if program.is_relative_to(ROOT) else program
    return "\n".join(
        [
            f"loss        {first['loss']:.3f} at step {first['step']} -> {last['loss']:.3f} at step {last['step']}",
            f"speed       {rate:,.0f} tokens/s (median step), {seconds:.0f} s in all",
            f"files       {shown}",
            f"every step  tail -n 3 {shlex.quote(f'{shown}/metrics.jsonl')}",
            f"a page      {tensorboard.parent / 'titanmoe'} report {shlex.quote(str(shown))}",
            f"curves      {tensorboard} --logdir {shlex.quote(str(shown.parent))}",
            f"resume      {resume_command(folder, ranks, arguments, last['step'])}",
            *generate_command(folder, tensorboard.parent / "titanmoe", str(shown)),
        ]
    )


def generate_command(folder: Path, titanmoe: Path, shown: str) -> list[str]:
    """Return [the line that shows how to generate text with the run's model]; [] if the run saved no checkpoint.

    `titanmoe` is the path of that program, `shown` the run's folder as the line names it.
    """
    if not list(folder.glob("checkpoints/*/manifest.json")):
        return []
    return [f"its text    {titanmoe} generate --checkpoint {shlex.quote(shown)} --prompt 'def ' --stream"]


def resume_command(folder: Path, ranks: int, arguments: list[str], step: int) -> str:
    """Return the command that continues the run, whose last step is `step`, to twice that step.

    `arguments` are the run's options after the recipe; name and steps are replaced, checkpoint.load is left out.
    """
    words, left_out = [], False
    for word in arguments:
        if word.startswith("--"):
            option = word.partition("=")[0]
            left_out = option in ("--checkpoint.load", "--job.name", "--training.steps")  # the others are given below
        words += [word] * (not left_out)
    command = Path(sys.executable).parent / "titanmoe"
    program = command.relative_to(ROOT) if command.is_relative_to(ROOT) else command
    more = ["--job.name", folder.name, "--training.steps", str(2 * step)]
    return f"{program} train {shlex.join([RECIPE, '--ranks', str(ranks), *words, *more])}"


def main() -> int:
    extra = sys.argv[1:]
    os.chdir(ROOT)
    try:
        ranks, mapping, config = configure(extra)
    except ConfigError as error:
        return exit_with(error.problems, error.source)
    started = time.time()
    arguments = [*mapping, *extra]
    code = run(ranks, arguments)
    if code:
        why = "the run was interrupted" if code == 130 else f"the run ended with exit code {code}; the reason is above"
        print(f"\nmake train: {why}", file=sys.stderr)
        return code
    folder = newest_run(config, started)
    print()
    print(summary(folder, time.time() - started, ranks, arguments) if folder else "the run wrote no metrics.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
