"""Objective on pairs of samples, which is not a sum over labels: -log sigmoid of the difference of their log p."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests import reference
from titanmoe.comm.collectives import all_reduce_autograd
from titanmoe.data.batch import Batch
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.parallel.batch_slice import BatchSlice
from titanmoe.train.objectives.objective import Objective
from titanmoe.train.objectives.objective_spec import ObjectiveSpec

NAME = f"{__name__}:Pairs"
BETA = 0.1


class Pairs(Objective):
    spec = ObjectiveSpec()

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        first, second = all_reduce_autograd(head.loss_BS.sum(1), self.meshes.cp).view(-1, 2).unbind(1)
        return F.softplus(BETA * (first - second)).sum() / self.meshes.cp.size

    def count(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch.labels_BS) // 2)


def mean(head: reference.HeadOutput, tokens: reference.Tokens) -> Tensor:
    """Return the mean over pairs of -log sigmoid(BETA * (log p of sample 2i - log p of sample 2i + 1)).

    log p is that of the reference model (tests/reference.py), summed over the labels of a sample.
    """
    total = head.loss_GS.sum(1)
    pairs = [torch.log1p(torch.exp(BETA * (total[i] - total[i + 1]))) for i in range(0, len(total), 2)]
    return torch.stack(pairs).mean()
