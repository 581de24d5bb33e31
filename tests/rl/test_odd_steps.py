"""Runs of reinforcement learning whose rewards fail, whose prompts are few, or that hardly sample."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import parity, world
from tests.support import byte_pairs
from titanmoe.data.tokenizer import FILE, SETTINGS
from titanmoe.parallel.materialize import local_shard
from titanmoe.rl import policy_trainer
from titanmoe.rl.policy_trainer import PolicyTrainer, PromptLoader
from titanmoe.train.run_folder import ROLLOUTS

RUN: dict[str, Any] = {
    "model.vocab_size": 320,
    "training.seq_len": 24,
    "training.steps": 2,
    "moe.aux_loss": 0.0,
    "rl.prompts_per_step": 2,
    "rl.completions": 2,
    "rl.reward_workers": 1,
    "generation.max_tokens": 4,
    "generation.batch_size": 2,
    "metrics.console": "lines",
    "job.name": "run",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"{i % 6} +", "number": i}) for i in range(7)]  # two are equal
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


def train(changes: dict[str, Any], folder: str) -> tuple[bool, int, int]:
    """Train on a rank; return whether the weights stayed, the step, and the number of prompts taken."""
    changes = RUN | {"rl.prompts": [f"{folder}/prompts.jsonl"], "job.dump_folder": folder} | changes
    training = parity.make_trainer(changes, loader=PromptLoader).training
    trainer = PolicyTrainer(parity.read(changes, training.runtime.world), training)
    before = {name: local_shard(x.detach())[0].clone() for name, x in training.parameters.items()}
    trainer.train()
    stays = all(torch.equal(before[name], local_shard(x.detach())[0]) for name, x in training.parameters.items())
    return stays, trainer.step, training.loader.consumed


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "run" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(folder: Path, changes: dict[str, Any], ranks: int = 1) -> tuple[bool, int, int]:
    return world.run(ranks, train, changes, str(folder))[0]


def calls(changes: dict[str, Any], folder: str) -> tuple[list[str], str]:
    """Train on a rank; return the names of its forwards of a token and of its rewards, in their order, and its output.

    Each line of progress that may be printed is.
    """
    changes = RUN | {"rl.prompts": [f"{folder}/prompts.jsonl"], "job.dump_folder": folder} | changes
    training = parity.make_trainer(changes, loader=PromptLoader).training
    trainer = PolicyTrainer(parity.read(changes, training.runtime.world), training)
    names = []

    def note(owner: Any, name: str) -> None:
        whole = getattr(owner, name)
        setattr(owner, name, lambda *args: names.append(name) or whole(*args))

    note(trainer.live.generator, "_advance")
    if trainer.rewards:
        note(trainer.rewards, "submit")
    with mock.patch.object(policy_trainer, "PROGRESS_INTERVAL_S", -1), contextlib.redirect_stdout(io.StringIO()) as out:
        trainer.train()
    return names, out.getvalue()


@pytest.mark.parametrize("ranks", [1, 2])
def test_completions_are_rewarded_while_others_are_generated(folder: Path, ranks: int) -> None:
    changes = {"rl.reward": "tests.support.odd_rewards:remainder", "training.steps": 1, "generation.batch_size": 8}
    changes |= {"generation.max_tokens": 9, "rl.completions": 8, "generation.stop": list("abcdefghijklmnopqrstuvwxyz")}
    names, printed = world.run(ranks, calls, changes, str(folder))[0]
    assert names.count("submit") == 16 and "_advance" in names[names.index("submit") :]
    *generated, rewarded = [line for line in printed.splitlines() if line.startswith(("generate ", "reward "))]
    tokens = round(16 * lines(folder, "metrics.jsonl")[0]["rl.length"])
    assert re.fullmatch(rf"generate   \d of 16 completions, {8 * ranks} tokens", generated[0])
    assert [generated[-1], rewarded] == [
        f"generate   16 of 16 completions, {tokens} tokens",
        "reward     16 of 16 completions",
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_rewards_changes_nothing_and_is_said(folder: Path, ranks: int) -> None:
    stays, step, _ = run(folder, {"rl.reward": "tests.support.odd_rewards:nothing"}, ranks)
    assert stays and step == 2
    events = [(line["step"], line["kind"], line["text"]) for line in lines(folder, "events.jsonl")]
    for number in (1, 2):
        assert (number, "reward", "4 of 4 completions got no reward and are left out: ValueError: no") in events
        assert any(
            event[:2] == (number, "skip") and event[2].startswith("no update: no completion") for event in events
        )
    assert [line["reward"] for line in lines(folder, ROLLOUTS)] == [None] * 4


def test_groups_of_one_have_no_advantage(folder: Path) -> None:
    changes = {"rl.reward": "tests.support.odd_rewards:every_second", "optimizer.weight_decay": 0.0}
    stays, step, _ = run(folder, changes)
    assert stays and step == 2  # gradients of 0 from the first step on
    metrics = lines(folder, "metrics.jsonl")
    assert [line["rl.unrewarded"] for line in metrics] == [2, 2]
    assert all(line["rl.reward"] == 1 and line["rl.equal_rewards"] == 1 for line in metrics)
    assert [line["grad_norm"] for line in metrics] == [0, 0]


def test_seven_prompts_and_rounds_of_three_steps(folder: Path) -> None:
    changes = {"rl.reward": "tests.support.odd_rewards:remainder", "rl.updates": 3, "training.steps": 4}
    stays, step, consumed = run(folder, changes | {"rl.held_out": 7, "rl.eval_interval": 3})
    assert not stays and step == 4
    assert consumed == 8  # no completions of prompts that no step would learn from
    metrics = lines(folder, "metrics.jsonl")
    assert [line["step"] for line in metrics if line["rl.generate_s"]] == [1, 4]
    assert [line["step"] for line in metrics if "val_reward" in line] == [3, 4]
    assert [line["policy.clipped"] for line in metrics[:1]] == [0]


def test_completions_without_an_end_are_masked_and_said(folder: Path) -> None:
    changes = {"rl.reward": "tests.support.odd_rewards:remainder", "generation.temperature": 1e-4, "rl.cut": "mask"}
    stays, _, _ = run(folder, changes)
    assert stays and all(line["is_cut"] for line in lines(folder, ROLLOUTS))
    assert [line["kind"] for line in lines(folder, "events.jsonl")].count("skip") == 2


@pytest.mark.parametrize(("reward", "value"), [("never_ends", 0.5), ("never_rewards", None)])
@pytest.mark.parametrize("turns", [1, 50])
def test_an_environment_without_an_end_is_cut(reward: str, value: float | None, turns: int, folder: Path) -> None:
    changes = {"rl.reward": f"tests.support.odd_rewards:{reward}", "rl.max_turns": turns, "generation.max_tokens": 16}
    run(folder, changes | {"generation.stop": list("abcdefghijklmnopqrstuvwxyz"), "training.steps": 1})
    completions = lines(folder, ROLLOUTS)
    assert len(completions) == 2 and all(line["is_cut"] and line["reward"] == value for line in completions)
    texts = [event["text"] for event in lines(folder, "events.jsonl") if event["kind"] == "reward"]
    assert all("the environment's message has no place in rl.max_turns turns" in text for text in texts)
    assert bool(texts) == (value is None)
    if turns > 1:
        assert max(len(line["turns"]) for line in completions) > 1
        assert all(set(line["turns"][1::2]) <= {"on"} for line in completions)


def test_a_tiny_temperature_samples_the_most_probable(folder: Path) -> None:
    changes = {"rl.reward": "tests.support.odd_rewards:remainder", "generation.temperature": 1e-4}
    _, step, _ = run(folder, changes)
    metrics = lines(folder, "metrics.jsonl")
    assert step == 2 and all(math.isfinite(line["grad_norm"]) for line in metrics)
    assert all(line["rl.equal_rewards"] == 1 and line["policy.entropy"] < 0.05 for line in metrics)


def test_checkpoints_carry_the_settings_beside_a_tokenizer(folder: Path) -> None:
    changes = RUN | {"rl.prompts": [f"{folder}/prompts.jsonl"], "rl.reward": "tests.support.odd_rewards:remainder"}
    assert PromptLoader(parity.read(changes, 1), 0, 1).mix.tokenizer is None
    changes |= {"data.tokenizer": str(byte_pairs.write_tokenizer(folder))}
    assert {FILE, SETTINGS} <= PromptLoader(parity.read(changes, 1), 0, 1).mix.tokenizer.files().keys()
