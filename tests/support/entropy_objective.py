"""Objective that reads the entropy at each label: cross-entropy minus a bonus for entropy."""

from __future__ import annotations

from torch import Tensor

from tests import reference
from titanmoe.data.batch import Batch
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.parallel.batch_slice import BatchSlice
from titanmoe.tokens import IGNORE
from titanmoe.train.objectives.objective import Objective
from titanmoe.train.objectives.objective_spec import ObjectiveSpec

NAME = f"{__name__}:EntropyBonus"
BONUS = 0.3


class EntropySpec(ObjectiveSpec):
    reads_entropy = True
    allows_mtp = True


class EntropyBonus(Objective):
    spec = EntropySpec()

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        return (head.loss_BS - BONUS * head.entropy_BS).sum()

    def count(self, batch: Batch) -> Tensor:
        return (batch.labels_BS != IGNORE).sum()


def mean(head: reference.HeadOutput, tokens: reference.Tokens) -> Tensor:
    """Return the mean over labels of cross-entropy - BONUS * entropy, of the reference model (tests/reference.py)."""
    return (head.loss_GS - BONUS * head.entropy_GS).sum() / (tokens.labels_GS != IGNORE).sum()
