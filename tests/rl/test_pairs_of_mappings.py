"""Log-probabilities of generator and trainer in float64, under every pair of a list of mappings of up to 8 ranks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from tests import world
from tests.support.case_features import FEATURES, changes
from tests.support.covering_mappings import all_folds, as_changes, cover, has_several_ranks
from tests.test_session import open_session
from titanmoe.config.schema import RL, GenerationParallelism
from titanmoe.fold.degrees import Fold
from titanmoe.generate.live_generator import LiveGenerator
from titanmoe.generate.loop import Generated, Prompt, Stop
from titanmoe.generate.model import generation_config
from titanmoe.generate.sampling import Sampling
from titanmoe.rl.rollouts import Rollout, advantages_and_weights, columns
from titanmoe.tokens import IGNORE

LENGTH, COMPLETIONS, TEMPERATURE = 16, 2, 0.8
PROMPTS = [[1 + (7 * i + 3 * j) % 40 for j in range(1 + i % 5)] for i in range(9)]
LAYERS = {"model.num_layers": 4}
FREE = ("recompute", "schedule", "cp", "batch", "dispatcher", "loss")
"""Features that do not change the model."""


def generators() -> list[tuple[int, GenerationParallelism]]:
    """Return all mappings that a generator of 8 experts can have on 1, 2, 4 and 8 ranks."""
    degrees = (1, 2, 4, 8)
    of_experts = [(ep, etp) for ep, etp in itertools.product(degrees, degrees) if ep * etp <= 8]
    return [
        (ranks, GenerationParallelism(tp, ep, etp))
        for ranks, tp, (ep, etp) in itertools.product(degrees, degrees, of_experts)
        if tp <= ranks and ep * etp <= ranks
    ]


def trainers() -> list[tuple[int, dict[str, Any]]]:
    """Return mappings of 1, 2, 4 and 8 ranks as recipe keys.

    All of 2; of 4 some that cover each pair of two axes, or of an axis and a feature; of 8 each pair of two axes.
    """
    out: list[tuple[int, dict[str, Any]]] = [(1, {}), *((2, as_changes(fold)) for fold in all_folds(2))]
    draw = random.Random(0)
    for ranks in (4, 8):
        folds = [fold for fold in all_folds(ranks) if fold.pp <= 4]
        drawn: list[tuple[Fold, dict[str, str]]] = []
        for fold in draw.choices(folds, k=2000):
            several = {"schedule": fold.pp > 1, "cp": fold.cp > 1}
            choice = {name: draw.choice([*FEATURES[name]]) for name in FREE if several.get(name, True)}
            if fold.pp < 4 or choice["schedule"] in ("GPipe", "1F1B"):  # others need more layers
                drawn.append((fold, choice))
        rows = [has_several_ranks(fold) | (choice if ranks == 4 else {}) for fold, choice in drawn]
        chosen = cover(rows, left_out=lambda a, b: a in FREE and b in FREE)
        out += [(ranks, changes(*drawn[i])) for i in chosen]
    return out


def completions(parallelism: GenerationParallelism) -> list[Generated]:
    """On a rank: generate completions of PROMPTS with a run's first weights."""
    session = open_session(LAYERS | {"training.global_batch_size": 8})
    session.config.generation.parallelism = parallelism
    generating = generation_config(session.config, session.training.runtime.world, "cpu")
    live = LiveGenerator(generating, session.training, vocab_size=48, ends={0}, timeout_s=60, records=True)
    prompts = [Prompt(number, ids, COMPLETIONS) for number, ids in enumerate(PROMPTS)]
    with live.loaded() as generator:
        (texts,) = generator.batches(
            prompts, len(prompts) * COMPLETIONS, Stop(LENGTH - 5), Sampling(TEMPERATURE, seed=1)
        )
    return texts


def log_probs(changed: dict[str, Any], sample_columns: dict[str, Any]) -> list[torch.Tensor]:
    """On a rank: compute the log-probabilities of the completions with the generator's experts, and with one's own."""
    session = open_session(changed | LAYERS)
    out = []
    for given in (sample_columns, {name: x for name, x in sample_columns.items() if name != "routes"}):
        batch = session.batch(**given)
        out.append(session.log_probs(batch, temperature=TEMPERATURE)[batch.labels_BS != IGNORE])
    return out


def test_generators_and_trainers_agree_under_every_pair_of_mappings() -> None:
    """Completions of counted draws are equal, so each of the mappings computes alone what all are compared by.

    65 mappings of a generator, all that there are, and 77 of a trainer, each with the generator's experts and with its
    own: 142 runs for 5,005 pairs.
    """
    rollouts: list[Rollout] = []
    found: list[torch.Tensor] = []
    for ranks, parallelism in generators():
        texts = world.run(ranks, completions, parallelism)[0]
        own = []
        for text in texts:
            own.append(
                Rollout(text.number, PROMPTS[text.number], text.completion_number, reward=float(text.number % 3))
            )
            own[-1].add_turn(text, "")
        rollouts = rollouts or own
        for one, first in zip(own, rollouts, strict=True):
            assert one.tokens == first.tokens and torch.equal(one.routes, first.routes), (ranks, parallelism)
        found.append(labelled(own))
    assert {len(one.tokens) for one in rollouts} > {LENGTH - 5}, "completions that end and completions that are cut"
    for ranks, changed in trainers():
        found += world.run(ranks, log_probs, changed, sample_columns(rollouts))[0]
    values = torch.stack(found)
    assert (values.amax(0) - values.amin(0)).max() < 1e-12 < 0.1 < values[0].std()
    assert len(generators()) == 65 and len(trainers()) == 77 and len(found) == 65 + 2 * 77


def sample_columns(rollouts: list[Rollout]) -> dict[str, Any]:
    return columns(rollouts, *advantages_and_weights(rollouts, RL(), LENGTH), LENGTH, replay=True)


def labelled(rollouts: list[Rollout]) -> torch.Tensor:
    """Return the generator's log-probability of each label, in the order of the batch."""
    found = sample_columns(rollouts)
    of_samples = zip(found["generator"], found["labels"], strict=True)
    return torch.cat([values[torch.tensor(labels) != IGNORE] for values, labels in of_samples])
