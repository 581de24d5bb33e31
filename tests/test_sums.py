"""Rewards rise in reinforcement learning: the recipe rl_debug on letters and, by scripts/sums.py, on sums."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_get_started import Newcomer
from tests.test_recipes import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from sums import for_both_runs

RECIPE = f"{ROOT}/train_configs/rl_debug.toml"
LETTERS = {
    "job.name": "letters", "job.ranks": 2, "parallelism.experts.ep": 2, "rl.reward": "regex", "rl.prompts_per_step": 8,
    "rl.completions": 8, "rl.held_out": 0, "rl.eval_interval": 0, "generation.max_tokens": 1, "training.steps": 25,
    "training.local_batch_size": 32, "training.global_batch_size": 32, "lr_schedule.decay": "none",
    "checkpoint.enable": "false", "checkpoint.load": "none", "checkpoint.model_only": "false",
}  # fmt: skip
"""Changes of rl_debug: the first byte of a completion is to be a small letter, as 26 of 320 ids are."""


def test_a_model_of_random_weights_learns_to_complete_with_letters(tmp_path: Path) -> None:
    records = [{"prompt": f"{digit}?", "solution": "^[a-z]"} for digit in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    user = Newcomer(tmp_path)
    user.has(["-m", "titanmoe", "train", RECIPE, *(f"--{name}={value}" for name, value in LETTERS.items())])
    lines = (tmp_path / "runs/letters/metrics.jsonl").read_text().splitlines()
    rewards = [line["rl.reward"] for line in map(json.loads, lines) if "rl.reward" in line]
    assert len(rewards) == 25 and sum(rewards[:5]) / 5 < 0.3 and sum(rewards[-5:]) / 5 > 0.8, rewards


@pytest.mark.slow
def test_the_script_teaches_sums(tmp_path: Path) -> None:
    command = [sys.executable, f"{ROOT}/scripts/sums.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    row = done.stdout.splitlines()[-1]
    assert re.fullmatch(r" +0  rollout +\d+(  ?\d\.\d\d){6}", row), row
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_options_of_the_machine_go_to_both_runs() -> None:
    options = ["--job.ranks", "1", "--rl.updates", "2", "--parallelism.tp=1", "--optimizer.lr", "1e-3"]
    assert for_both_runs(options) == ["--job.ranks", "1", "--parallelism.tp=1"]
