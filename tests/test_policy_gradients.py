"""Gradients of every policy objective against plain code in float64, under mappings that cover axes and features.

The plain code is the reference model in one process, softmax over the ids that exist, and the papers' formulas written
out completion by completion; it shares nothing with the code under test.
"""

from __future__ import annotations

import random
import statistics
from typing import Any, NamedTuple

import pytest
import torch

from tests import parity, reference, world
from tests.support import blame
from tests.support.case_features import FEATURES, changes
from tests.support.covering_mappings import all_folds, case_id, cover, has_several_ranks
from tests.support.parity_errors import TOLERANCE, relative_error, worst_error
from tests.test_policy import by_hand
from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.fold.degrees import Fold
from titanmoe.observe import Observer, listening
from titanmoe.policy import Normalisation, PolicyLoss, group_advantages, token_weights
from titanmoe.session import Session
from titanmoe.tokens import IGNORE
from titanmoe.train.world_batch import NoLoader

SAMPLES, IDS, LONGEST = 7, 47, 16
REWARDS = [1.0, 0.0, 0.25, 0.5, 0.5, 2.0, -1.0]
GROUPS = [0, 0, 1, 2, 2, 0, 1]  # equal rewards in group 2


class Objective(NamedTuple):
    """A policy objective with what the caller computes for it."""

    loss: PolicyLoss
    weights: Normalisation = "sample"
    divide_by_std: bool = True
    extra: tuple[str, ...] = ()
    """Columns besides the advantage and its weight."""


OBJECTIVES = {
    "grpo": Objective(PolicyLoss(), extra=("old",)),
    "dr_grpo": Objective(PolicyLoss(), "constant", divide_by_std=False, extra=("old",)),
    "dapo": Objective(PolicyLoss(clip_high=0.28), "token", extra=("old",)),
    "gspo": Objective(PolicyLoss(level="sequence", clip_low=0.05, clip_high=0.06), extra=("old",)),
    "truncated by token": Objective(PolicyLoss(truncation=2.0), "token", extra=("old", "generator")),
    "truncated by sequence": Objective(
        PolicyLoss(truncation=2.0, truncate="sequence"), "token", extra=("old", "generator")
    ),
    "k1": Objective(PolicyLoss(estimator="k1"), extra=("old", "reference", "kl_weight")),
    "k3": Objective(PolicyLoss(estimator="k3"), extra=("old", "reference", "kl_weight")),
    "on policy": Objective(PolicyLoss(truncation=2.0), "token", extra=("generator",)),
    "with cross-entropy": Objective(PolicyLoss(), extra=("old", "sft_weight")),
}
HEADS = [(1.0, 0), (0.7, IDS), (0.7, 0), (1.0, IDS)]
"""Temperature, and the number of ids that exist in a padded vocabulary, 0 for all."""
Work = list[tuple[str, float, int]]
"""Names of objectives, each with a temperature and a number of ids."""

OPTIONS = {name: list(FEATURES[name]) for name in ("model", "recompute", "schedule", "cp", "batch")}
OPTIONS |= {name: list(FEATURES[name]) for name in ("documents", "loss", "trained")}
OPTIONS |= {"balance": ["none", "sequence+z"], "dispatcher": ["alltoall", "allgather", "hierarchical"]}
"""Features that a step of several calls can have, besides those that its number of microbatches would show in."""


def candidates(world: int, count: int) -> list[tuple[Fold, dict[str, str]]]:
    draw, out = random.Random(0), []
    folds = [fold for fold in all_folds(world) if fold.pp <= 4]
    for _ in range(count):
        fold = draw.choice(folds)
        choice = {feature: draw.choice(names) for feature, names in OPTIONS.items()}
        out.append((fold, {f: v for f, v in choice.items() if {"schedule": fold.pp, "cp": fold.cp}.get(f, 2) > 1}))
    return out


def cost(fold: Fold, choice: dict[str, str]) -> float:
    """About that of a step: building, and how often the ranks run a layer."""
    changed = changes(fold, choice)
    return 3 + changed.get("model.num_layers", 2) / fold.pp * changed["training.global_batch_size"] / fold.dp


def cases() -> list[Any]:
    """Five mappings of 4 ranks, so that each axis is there; with four objectives each, so that each objective is twice.

    Slow: mappings of 4 and 8 ranks that cover each pair of two axes, or of an axis and a feature, with the objectives
    in turns.
    """
    of_4, of_8 = candidates(4, 3000), candidates(8, 1500)
    quick = cover([has_several_ranks(fold) for fold, _ in of_4], cost=lambda row: cost(*of_4[row]))
    rows = [has_several_ranks(fold) | choice for fold, choice in of_4]
    wide = cover(rows, left_out=lambda a, b: a in OPTIONS and b in OPTIONS)
    slow = [of_4[i] for i in wide] + [of_8[i] for i in cover([has_several_ranks(fold) for fold, _ in of_8])]
    names, out = [*OBJECTIVES], []
    for i, (fold, choice) in enumerate([*(of_4[number] for number in quick[:5]), *slow]):
        chosen = [names[(4 * i + j) % len(names)] for j in range(4)]
        work = [(name, *HEADS[(i // 5 + j) % len(HEADS)]) for j, name in enumerate(chosen)]
        name, mark = "-".join([case_id(fold), *choice.values(), chosen[0]]), pytest.mark.slow if i >= 5 else ()
        out.append(pytest.param(fold, choice, work, id=name, marks=mark))
    return out


def samples(config: Config, documents: bool) -> Batch:
    """Samples without the ids that a padded vocabulary has not."""
    batch = parity.batch(config, list(range(SAMPLES)), documents)
    ids, labels = (x.masked_fill(x >= IDS, 0) for x in (batch.tokens_BS, batch.labels_BS))
    return batch._replace(tokens_BS=ids, labels_BS=labels)


def given(shape: torch.Size) -> dict[str, torch.Tensor]:
    """Log-probabilities of three other models, far enough apart that ratios are clipped and truncated."""
    generator = torch.Generator().manual_seed(3)
    old, apart, other = torch.randn((3, *shape), generator=generator, dtype=torch.float64)
    old = -4 + 0.5 * old
    return {"old": old, "generator": old + 0.5 * apart, "reference": -4 + 0.3 * other}


def with_columns(objective: Objective, batch: Batch) -> Batch:
    """The batch as a caller of titanmoe.policy makes it."""
    has_label = batch.labels_BS != IGNORE
    advantages = group_advantages(REWARDS, GROUPS, divide_by_std=objective.divide_by_std)
    weight = token_weights(has_label, objective.weights, LONGEST)
    columns = given(has_label.shape) | {"kl_weight": 0.1 * weight, "sft_weight": 0.01 * has_label.double()}
    chosen = {"advantage": advantages.unsqueeze(1).expand(has_label.shape), "weight": weight}
    return batch._replace(extra_fields=chosen | {name: columns[name] for name in objective.extra})


def with_columns_by_hand(objective: Objective, batch: Batch) -> Batch:
    """Add the columns by the formulas: rewards against those of the group, and what each token counts in the mean."""
    tokens = (batch.labels_BS != IGNORE).sum(1).tolist()
    advantage, weight = torch.zeros(2, *batch.labels_BS.shape, dtype=torch.float64)
    for n in range(SAMPLES):
        group = [reward for reward, one in zip(REWARDS, GROUPS, strict=True) if one == GROUPS[n]]
        std = statistics.stdev(group) + 1e-6 if objective.divide_by_std else 1.0
        advantage[n] = (REWARDS[n] - statistics.mean(group)) / std
        per_sample = sum(count > 0 for count in tokens)
        divisor = {"sample": per_sample * tokens[n], "token": sum(tokens), "constant": per_sample * LONGEST}
        weight[n] = 1 / max(1, divisor[objective.weights])
    columns = given(batch.labels_BS.shape) | {"kl_weight": 0.1 * weight, "sft_weight": torch.full_like(weight, 0.01)}
    chosen = {"advantage": advantage, "weight": weight}
    return batch._replace(extra_fields=chosen | {name: columns[name] for name in objective.extra})


class Outcome(NamedTuple):
    """Result of a step with one objective."""

    loss: float
    grads: dict[str, torch.Tensor]
    clipped: float


def steps(changed: dict[str, Any], documents: bool, work: Work) -> list[Outcome]:
    """On a rank: the full gradients of a step for each objective, made of two calls."""
    trainer = parity.make_trainer(changed, loader=NoLoader)
    training, rank = trainer.training, trainer.training.runtime.rank
    parity.random_b(trainer)
    config = parity.read(changed, training.runtime.world)
    places = blame.describe_shards(training.parameters)
    grads: list[dict[str, torch.Tensor]] = []

    class Capture(Observer):
        def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
            own = {name: parameter.grad for name, parameter in parameters.items()}
            grads.append(parity.whole(own, rank, training.fold, places))

    out = []
    for name, temperature, ids in work:
        session, objective = Session(config, training, ids=ids), OBJECTIVES[name]
        full = with_columns(objective, samples(config, documents))
        counts, loss, log_probs = session.count(full, objective.loss, divisor=1), 0.0, []
        for first, end in ((0, 3), (3, SAMPLES)):
            part = [None if x is None else x[first:end] for x in full[:-1]]
            batch = Batch(*part, {column: x[first:end] for column, x in full.extra_fields.items()})
            result = session.forward_backward(
                batch, objective.loss, counts=counts, temperature=temperature, log_probs=True
            )
            loss += float(result.loss)
            log_probs.append(result.log_probs)
        with listening(Capture()):
            session.optim_step(rate=0.0)
        clipped = objective.loss.metrics(torch.cat(log_probs), full)["policy.clipped"]
        found = {name: grad for name, grad in grads.pop().items() if name != "embed_copy.weight"}
        if config.model.tie_embeddings:
            found.pop("head.weight", None)
        out.append(Outcome(loss, found, clipped))
    return out


def expected(changed: dict[str, Any], documents: bool, work: Work) -> list[Outcome]:
    """Compute the results of `steps` by plain code."""
    config = parity.read(changed, 1)
    start = parity.initial_weights(config)
    weights = {name: w.detach().requires_grad_(reference.trains(config, name)) for name, w in start.items()}
    merged = reference.with_whole_norms(config.model, reference.with_adapters(config, weights, 1))
    batch = samples(config, documents)
    tokens = reference.Tokens.of([[batch]])
    logits, _, layers = reference.forward(config, merged, tokens, reference.initial_bias(config.model))
    balance = sum(c * one.terms[name] for name, c in reference.coefficients(config).items() for one in layers.values())
    trained, out = {name: w for name, w in weights.items() if w.requires_grad}, []
    for name, temperature, ids in work:
        log_p_V = (logits[..., : ids or None] / temperature).log_softmax(-1)
        log_p = log_p_V.gather(-1, batch.labels_BS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = by_hand(OBJECTIVES[name].loss, log_p, with_columns_by_hand(OBJECTIVES[name], batch))
        found = torch.autograd.grad(loss + balance, [*trained.values()], retain_graph=True, materialize_grads=True)
        out.append(Outcome(loss.item(), dict(zip(trained, found, strict=True)), 0.0))
    return out


@pytest.mark.parametrize(("fold", "choice", "work"), cases())
def test_gradients_are_those_of_plain_code(fold: Fold, choice: dict[str, str], work: Work) -> None:
    changed, documents = changes(fold, choice), choice["documents"] == "yes"
    neutral = {key: value for key, value in changed.items() if not key.startswith(parity.NEUTRAL)}
    ours = world.run(fold.world, steps, changed, documents, work)[0]
    for (name, *_), got, want in zip(work, ours, expected(neutral, documents, work), strict=True):
        if OBJECTIVES[name].loss.level == "token":  # of six completions' ratios none may be clipped
            assert (0 < got.clipped < 1) == ("old" in OBJECTIVES[name].extra), name
        assert relative_error(got.loss, want.loss) < TOLERANCE["float64"], name
        error, where = worst_error(got.grads, want.grads)
        assert error < TOLERANCE["float64"], f"{name}: {where} is {error:.1e} from plain code"
