"""Completions with their rewards, and the batch that a policy learns from them.

Several completions are packed into a sample, each with its prompt a document of its own.
Shapes: N completions, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.config.schema import RL
from titanmoe.generate.loop import Generated
from titanmoe.policy import group_advantages, token_weights
from titanmoe.rl.rewards import Reward
from titanmoe.tokens import IGNORE, NOT_RECORDED


@dataclass
class Rollout:
    """A completion of a prompt, with its reward: one turn, or several with a message of an environment between them."""

    prompt: int
    """Index of the prompt among those that are completed together; not its number in the files."""
    prompt_ids: list[int]
    completion_number: int = 0
    """Number of the completion among those of the prompt."""
    tokens: list[int] = field(default_factory=list)
    """Token ids of the completion, with end marks and messages."""
    log_probs: list[float] = field(default_factory=list)
    """The generator's log-probability of each token of the completion; 0 for those of messages."""
    messages: list[range] = field(default_factory=list)
    """Places of each message in `tokens`."""
    routes: Tensor | None = None
    """Experts of each token but the last, (tokens, MoE layers, K); None before the first turn."""
    is_cut: bool = False
    """Whether the completion ends because it has as many tokens or turns as it may have."""
    reward: float = math.nan
    """NaN if there is none."""
    turns: list[str] = field(default_factory=list)
    """Texts of the turns and of the messages between them."""

    @property
    def ids(self) -> list[int]:
        """Token ids of the prompt and the completion."""
        return self.prompt_ids + self.tokens

    @property
    def labels(self) -> list[int]:
        """The completion's tokens, with IGNORE in the place of those of messages."""
        labels = list(self.tokens)
        for places in self.messages:
            labels[places.start : places.stop] = [IGNORE] * len(places)
        return labels

    @property
    def num_generated(self) -> int:
        """Number of the completion's tokens that the model chose."""
        return len(self.tokens) - sum(map(len, self.messages))

    @property
    def text(self) -> str:
        """The completion's text for people: its turns and messages, joined by newlines."""
        return "\n".join(self.turns)

    def add_turn(self, generated: Generated, text: str) -> None:
        """Append a turn that the model generated, whose decoded text is `text`; set `is_cut` if its length ended it."""
        routes = torch.cat(generated.routes)
        # Tokens of earlier turns were read again, but keep the experts with which they were chosen.
        self.routes = routes if self.routes is None else torch.cat([self.routes, routes[len(self.routes) :]])
        self.tokens += generated.tokens
        self.log_probs += generated.log_probs
        self.turns.append(text)
        self.is_cut = generated.end == "length"

    def add_reward(self, reward: Reward) -> None:
        """Store the reward of a completion that is over; if it has `ids`, append its message instead, and it goes on.

        A message without ids found no room: the completion is cut.
        """
        if reward.ids is None:
            self.reward = reward.value
            self.is_cut |= reward.message is not None
            return
        self.messages.append(range(len(self.tokens), len(self.tokens) + len(reward.ids)))
        self.tokens += reward.ids
        self.log_probs += [0.0] * len(reward.ids)
        self.turns.append(reward.message)


def advantages_and_weights(rollouts: Sequence[Rollout], options: RL, longest: int) -> tuple[list[float], list[float]]:
    """Return the advantage of each completion, and the weight in the loss of each token of it that the model chose.

    Both lists have a number per completion, in the order of the completions. Weights are those of a mean over the step
    by rl.normalisation, already divided: with "token" 1 / all tokens of weight above 0. Completions without a reward
    have advantage and weight 0 and take no part in the mean of their prompt. Completions that were cut take part: their
    reward is lowered by rl.cut_penalty, and their weight is 0 if rl.cut is "mask".

    Args:
        rollouts: all completions of a step.
        longest: the most tokens that a completion may have.
    """
    rewarded = [one for one in rollouts if not math.isnan(one.reward)]
    values = group_advantages(
        [one.reward - options.cut_penalty * one.is_cut for one in rewarded],
        [one.prompt for one in rewarded],
        divide_by_std=options.divide_by_std,
    )
    by_completion = dict(zip(map(id, rewarded), values.tolist(), strict=True))
    learned = torch.tensor(
        [not math.isnan(one.reward) and not (one.is_cut and options.cut == "mask") for one in rollouts]
    )
    length_N = torch.tensor([one.num_generated for one in rollouts])
    has_loss_NL = (torch.arange(int(length_N.max())) < length_N.unsqueeze(1)) & learned.unsqueeze(1)
    weight_NL = (
        token_weights(has_loss_NL, options.normalisation, longest) if has_loss_NL.any() else has_loss_NL.double()
    )
    return [by_completion.get(id(one), 0.0) for one in rollouts], weight_NL[:, 0].tolist()


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Return samples as lists of indices of documents that fit into seq_len together, longest first.

    Each document is in one sample, in the first that has room. `lengths` are their positions, each at most seq_len.
    """
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
    """Return the arguments of `Session.batch` by name, with several completions packed into each sample.

    Each is a list with one entry for each sample: "ids", "labels", "documents", "advantage", "weight", "generator"
    (log-probabilities), and with `replay` "routes".

    Args:
        weights: of each completion, the weight of each token that the model chose: one number.
        seq_len: positions of a sample.
        replay: whether to give the routers the generator's choices.
    """
    out: dict[str, list[Any]] = {
        name: [] for name in ("ids", "labels", "documents", "advantage", "weight", "generator")
    }
    if replay:
        out["routes"] = []
    for sample in pack([len(one.ids) for one in rollouts], seq_len):
        row: dict[str, list[Any]] = {name: [] for name in out}
        for number, i in enumerate(sample):
            one, before = rollouts[i], len(rollouts[i].prompt_ids) - 1
            labels = one.labels
            row["ids"] += one.ids
            row["labels"] += [IGNORE] * before + labels + [IGNORE]
            row["documents"] += [number] * len(one.ids)
            for name, value in (("advantage", advantages[i]), ("weight", weights[i])):
                row[name] += [0.0] * before + [value * (label != IGNORE) for label in labels] + [0.0]
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
    """Return metrics of one completion or more by name.

    Returns:
        "rl.reward" (mean of rewarded completions; 0 without any), "rl.unrewarded" (number of completions without one),
        "rl.length" (mean tokens that the model chose), "rl.turns" (mean), "rl.cut" (fraction of completions that were
        cut), "rl.equal_rewards" (fraction of prompts whose completions all have the same reward, or none).
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
        "rl.length": sum(one.num_generated for one in rollouts) / len(rollouts),
        "rl.turns": sum(len(one.messages) + 1 for one in rollouts) / len(rollouts),
        "rl.cut": sum(one.is_cut for one in rollouts) / len(rollouts),
        "rl.equal_rewards": sum(len(values) <= 1 for values in by_prompt.values()) / len(by_prompt),
    }
