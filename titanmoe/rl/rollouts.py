"""Answers with their rewards, and the batch that a policy learns from them.

Several answers are packed into a sample, each with its prompt a document of its own. Shapes: A answers, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.config.schema import RL
from titanmoe.policy import group_advantages, token_weights
from titanmoe.tokens import IGNORE, NOT_RECORDED


@dataclass
class Rollout:
    """An answer to a prompt, with its reward."""

    prompt: int
    """Number of the prompt."""
    prompt_ids: list[int]
    tokens: list[int]
    """Token ids of the answer, the end mark included."""
    log_probs: list[float]
    """The generator's log-probability of each token of the answer."""
    routes: Tensor
    """Experts of each token but the last, (tokens, MoE layers, K)."""
    is_cut: bool
    """Whether the answer ends because it has as many tokens as it may have."""
    reward: float
    """NaN if there is none."""
    text: str = ""
    """The answer's text."""


def advantages_and_weights(rollouts: Sequence[Rollout], options: RL, longest: int) -> tuple[list[float], list[float]]:
    """Return each answer's advantage, and the weight in the loss of any of its tokens: one number of each per answer.

    Answers without a reward have weight 0 and take no part in the mean of their prompt. Answers that were cut have
    weight 0 if rl.cut is "mask".

    Args:
        rollouts: all answers of a step.
        options: the recipe's [rl].
        longest: the most tokens that an answer may have.
    """
    rewarded = [one for one in rollouts if not math.isnan(one.reward)]
    values = group_advantages(
        [one.reward - options.cut_penalty * one.is_cut for one in rewarded],
        [one.prompt for one in rewarded],
        divide_by_std=options.divide_by_std,
    )
    by_answer = dict(zip(map(id, rewarded), values.tolist(), strict=True))
    learned = torch.tensor(
        [not math.isnan(one.reward) and not (one.is_cut and options.cut == "mask") for one in rollouts]
    )
    length_A = torch.tensor([len(one.tokens) for one in rollouts])
    has_loss_AL = (torch.arange(int(length_A.max())) < length_A.unsqueeze(1)) & learned.unsqueeze(1)
    weight_AL = (
        token_weights(has_loss_AL, options.normalisation, longest) if has_loss_AL.any() else has_loss_AL.double()
    )
    return [by_answer.get(id(one), 0.0) for one in rollouts], weight_AL[:, 0].tolist()


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Return samples as lists of indices of documents that fit into seq_len together, longest first."""
    samples: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((j for j, room in enumerate(rooms) if room >= lengths[i]), len(samples))
        if place == len(samples):
            samples.append([])
            rooms.append(seq_len)
        samples[place].append(i)
        rooms[place] -= lengths[i]
    return samples


def columns(
    rollouts: Sequence[Rollout], advantages: Sequence[float], weights: Sequence[float], seq_len: int, replay: bool
) -> dict[str, Any]:
    """Return the arguments of `Session.batch` by name, with several answers packed into each sample.

    They are "ids", "labels", "documents", "advantage", "weight", "generator" (log-probabilities), and with `replay`
    "routes": a list with one entry for each sample.

    Args:
        rollouts: the answers.
        advantages: the advantage of each answer.
        weights: the weight of each token of each answer.
        seq_len: positions of a sample.
        replay: whether to give the routers the generator's choices.
    """
    out: dict[str, list[Any]] = {
        name: [] for name in ("ids", "labels", "documents", "advantage", "weight", "generator")
    }
    if replay:
        out["routes"] = []
    for sample in pack([len(one.prompt_ids) + len(one.tokens) for one in rollouts], seq_len):
        row: dict[str, list[Any]] = {name: [] for name in out}
        for number, i in enumerate(sample):
            one, before = rollouts[i], len(rollouts[i].prompt_ids) - 1
            length = before + 1 + len(one.tokens)
            row["ids"] += one.prompt_ids + one.tokens
            row["labels"] += [IGNORE] * before + one.tokens + [IGNORE]
            row["documents"] += [number] * length
            for name, value in (("advantage", advantages[i]), ("weight", weights[i])):
                row[name] += [0.0] * before + [value] * len(one.tokens) + [0.0]
            row["generator"] += [0.0] * before + one.log_probs + [0.0]
            if replay:
                row["routes"].append(F.pad(one.routes, (0, 0, 0, 0, 0, 1), value=NOT_RECORDED))
        if replay:
            row["routes"] = torch.cat(row["routes"])
        for name, values in row.items():
            is_number = name in ("advantage", "weight", "generator")
            out[name].append(torch.tensor(values, dtype=torch.float64) if is_number else values)
    return out


def summary(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of answers by name.

    Mean reward (0 without any), number of answers without one, mean tokens, fraction of answers that were cut, and
    fraction of prompts whose answers all have the same reward.
    """
    rewards = [one.reward for one in rollouts if not math.isnan(one.reward)]
    by_prompt: dict[int, set[float]] = {}
    for one in rollouts:
        values = by_prompt.setdefault(one.prompt, set())
        if not math.isnan(one.reward):
            values.add(one.reward)
    return {
        "rl.reward": sum(rewards) / max(1, len(rewards)),
        "rl.unrewarded": len(rollouts) - len(rewards),
        "rl.length": sum(len(one.tokens) for one in rollouts) / len(rollouts),
        "rl.cut": sum(one.is_cut for one in rollouts) / len(rollouts),
        "rl.equal_rewards": sum(len(values) <= 1 for values in by_prompt.values()) / len(by_prompt),
    }
