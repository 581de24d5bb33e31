"""The mean cross-entropy over all labels of a step, each with a weight of its own: divided by the sum of weights."""

from __future__ import annotations

from torch import Tensor

from titanmoe.data.batch import WEIGHT, Batch
from titanmoe.models.vocabulary import Scores
from titanmoe.parallel.batch_slice import Slice
from titanmoe.tokens import IGNORE
from titanmoe.train.objectives.objective import Objective


class WeightedCrossEntropy(Objective):
    def sum(self, scores: Scores, piece: Slice) -> Tensor:
        return (scores.loss_BS * piece.further[WEIGHT]).sum()

    def count(self, batch: Batch) -> Tensor:
        return (batch.further[WEIGHT].double() * (batch.labels_BS != IGNORE)).sum()
