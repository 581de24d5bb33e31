"""Direct preference optimization (arXiv 2305.18290): raises the chosen of two completions against the rejected one.

With the reward r = beta * (log p - log p_ref) of a completion, summed over its labels, the loss of a pair is
-log sigmoid(r_chosen - r_rejected), averaged over pairs. It is computed as ln 2 (`constant`) plus the difference from
ln 2: a model that equals its reference has a loss of exactly ln 2.

Shapes: B samples, S positions of the attention slice, L completions of a sample, at most the full sequence's positions,
P = L / 2 pairs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.collectives import all_reduce_autograd
from titanmoe.config.schema import Config
from titanmoe.data.batch import COMPLETION, PAIRS, REFERENCE, Batch
from titanmoe.fold.meshes import Meshes
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.parallel.batch_slice import BatchSlice
from titanmoe.tokens import IGNORE
from titanmoe.train.objectives.objective import Objective


class DPO(Objective):
    """Loss of direct preference optimization, averaged over pairs."""

    metrics = "preference.accuracy", "preference.chosen", "preference.rejected", "preference.kl"
    constant = math.log(2)

    def __init__(self, meshes: Meshes, beta: float):
        super().__init__(meshes)
        self.beta = beta

    @classmethod
    def build(cls, config: Config, meshes: Meshes) -> DPO:
        return cls(meshes, config.dpo.beta)

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        completion_BS, cp = batch_slice.extra_fields[COMPLETION], self.meshes.cp
        gain_BS = (
            (-head.loss_BS - batch_slice.extra_fields[REFERENCE]).double().where(batch_slice.labels_BS != IGNORE, 0)
        )
        samples, length = completion_BS.shape[0], completion_BS.shape[1] * cp.size
        length += length % 2
        place_BS = completion_BS + length * torch.arange(samples, device=completion_BS.device).unsqueeze(1)
        gain_BL = gain_BS.new_zeros(samples * length).index_add(0, place_BS.flatten(), gain_BS.flatten())
        reward_BP2 = self.beta * all_reduce_autograd(gain_BL, cp).view(samples, -1, 2)
        chosen_BP, rejected_BP = reward_BP2.unbind(2)
        margin_BP = chosen_BP - rejected_BP
        # Without a pair the margin is 0, and so is the excess.
        excess_BP = F.logsigmoid(torch.zeros_like(margin_BP)) - F.logsigmoid(margin_BP)
        sums = (margin_BP > 0).sum(), chosen_BP.sum(), rejected_BP.sum()
        # KL(reference | model) of a completion, by the second-order estimate that is never negative.
        kl = gain_BS.square().sum() / 4
        self.report(batch_slice, *(total / cp.size for total in sums), kl)
        return excess_BP.sum() / cp.size

    def count(self, batch: Batch) -> Tensor:
        return batch.extra_fields[PAIRS].sum()
