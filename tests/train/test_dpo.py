"""DPO: its loss, its gradient and its reference, in float64."""

from __future__ import annotations

import math
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests import parity, reference
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.config import ConfigError
from titanmoe.data.batch import COMPLETION, PAIRS, REFERENCE, WEIGHT
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.tokens import IGNORE
from titanmoe.train.objectives.cross_entropy import WeightedCrossEntropy
from titanmoe.train.objectives.dpo import DPO

BETA = 0.3
PREFERENCES = {
    "training.objective": "dpo",
    "dpo.beta": BETA,
    "data.source": "files",
    "data.paths": ["pairs.jsonl"],
    "data.format": "preference",
    "training.global_batch_size": 4,
}
reference.OBJECTIVES["dpo"] = reference.dpo(BETA)


@pytest.mark.parametrize(
    "mapping",
    [
        {"parallelism.cp": 2, "parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2},
        {"parallelism.pp": 2, "parallelism.cp": 2, "parallelism.experts.ep": 2, "pipeline.schedule": "1F1B"},
        {"parallelism.cp": 2, "parallelism.experts.ep": 4, "lora.rank": 4, "training.local_batch_size": 2},
        {"parallelism.pp": 2, "parallelism.cp": 2, "parallelism.vocab": "pipeline"},
    ],
    ids=["cp, tp, ep and etp", "pp and cp", "adapters", "a shared vocabulary"],
)
def test_no_mapping_changes_a_number(mapping: dict[str, Any]) -> None:
    parity.check(4, PREFERENCES | mapping, documents=True, steps=1)


def pieces(pairs: int, seed: int = 0) -> tuple[torch.Tensor, Any]:
    """The cross-entropy of labels of one sample, and its batch: `pairs` pairs of completions with gaps between them."""
    draw = torch.Generator().manual_seed(seed)
    length = 10 * pairs + 3
    completion = torch.arange(length).clamp(max=10 * pairs - 1) // 5
    labels = torch.where((torch.arange(length) % 5 < 2) | (torch.arange(length) >= 10 * pairs), IGNORE, 7)
    loss, said = (5 * torch.rand(2, 1, length, dtype=torch.float64, generator=draw)).where(labels != IGNORE, 0)
    extra_fields = {COMPLETION: completion.unsqueeze(0), PAIRS: torch.tensor([pairs]), REFERENCE: -said}
    batch_slice = SimpleNamespace(labels_BS=labels.unsqueeze(0), extra_fields=extra_fields)
    return loss.requires_grad_(), batch_slice


def objective(kind: Any, *more: Any) -> Any:
    return kind(SimpleNamespace(cp=NO_GROUP), *more)


def test_the_gradient_is_that_of_weighted_cross_entropy() -> None:
    """DPO's gradient weighs log-probabilities by beta sigmoid(-D): chosen labels up, rejected ones down."""
    loss, batch_slice = pieces(3)
    dpo = objective(DPO, BETA)
    (grad,) = torch.autograd.grad(dpo.sum(HeadOutput(loss), batch_slice), loss)

    gain = (-loss.detach() - batch_slice.extra_fields[REFERENCE]).where(batch_slice.labels_BS != IGNORE, 0)
    weight, excess = torch.zeros_like(gain), 0.0
    for pair in range(3):
        of = [batch_slice.extra_fields[COMPLETION] == 2 * pair + side for side in (0, 1)]
        d = BETA * float(gain[of[0]].sum() - gain[of[1]].sum())
        excess += math.log1p(math.exp(-d))
        for mask, sign in zip(of, (1, -1), strict=True):
            weight[mask & (batch_slice.labels_BS != IGNORE)] = sign * BETA / (1 + math.exp(d))
    weighted = SimpleNamespace(labels_BS=batch_slice.labels_BS, extra_fields=MappingProxyType({WEIGHT: weight}))
    (want,) = torch.autograd.grad(objective(WeightedCrossEntropy).sum(HeadOutput(loss), weighted), loss)
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-15)
    assert dpo.sum(HeadOutput(loss), batch_slice).item() / 3 + dpo.constant == pytest.approx(excess / 3, rel=1e-12)


def test_its_metrics_are_of_each_pair() -> None:
    loss, batch_slice = pieces(2, seed=1)
    dpo = objective(DPO, BETA)
    for _ in range(2):  # of one microbatch only the last pass counts
        dpo.sum(HeadOutput(loss), batch_slice)
    accuracy, chosen, rejected, kl = (dpo.take_metrics(torch.zeros(())) / 2).tolist()
    gain = (-loss.detach() - batch_slice.extra_fields[REFERENCE]).where(batch_slice.labels_BS != IGNORE, 0)
    completions = [float(gain[batch_slice.extra_fields[COMPLETION] == n].sum()) for n in range(4)]
    assert chosen == pytest.approx(BETA * (completions[0] + completions[2]) / 2, rel=1e-6)
    assert rejected == pytest.approx(BETA * (completions[1] + completions[3]) / 2, rel=1e-6)
    assert accuracy == sum(completions[n] > completions[n + 1] for n in (0, 2)) / 2
    assert kl == pytest.approx(float(gain.square().sum()) / 2 / 4, rel=1e-6)
    assert dpo.take_metrics(torch.zeros(())).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("objective", ["cross_entropy", "distillation"])
def test_beta_needs_the_objective(objective: str) -> None:
    with pytest.raises(ConfigError, match=rf'"{objective}" does not read dpo\.beta = 0\.3: use objective = "dpo", or'):
        parity.read({"training.objective": objective, "dpo.beta": BETA}, 1)
