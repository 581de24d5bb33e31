"""The cross-entropy of all labels, plain or weighted.

Chosen by training.objective, called by titanmoe.train.gradients for each microbatch.

Shapes: B samples, S positions of the attention slice.
"""

from __future__ import annotations

from torch import Tensor

from titanmoe.data.batch import WEIGHT, Batch
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.parallel.batch_slice import BatchSlice
from titanmoe.tokens import IGNORE
from titanmoe.train.objectives.objective import Objective


class CrossEntropy(Objective):
    """Cross-entropy of all labels: its sum and their number, by which the step divides."""

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        return head.loss_BS.sum()

    def count(self, batch: Batch) -> Tensor:
        return (batch.labels_BS != IGNORE).sum()


class WeightedCrossEntropy(Objective):
    """Cross-entropy times the data's label weights: its sum, and the sum of the weights, by which the step divides."""

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        return (head.loss_BS * batch_slice.extra_fields[WEIGHT]).sum()

    def count(self, batch: Batch) -> Tensor:
        return (batch.extra_fields[WEIGHT].double() * (batch.labels_BS != IGNORE)).sum()
