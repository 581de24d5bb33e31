"""Objectives of `titanmoe.session.Session`: a function of log-probabilities, and passes that record log-probabilities.

They have no name in recipes. Shapes: B samples, S positions of the attention slice, L positions of a full sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titanmoe.comm.collectives import all_gather_autograd
from titanmoe.data.batch import Batch
from titanmoe.fold.meshes import Meshes
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.parallel.batch_slice import BatchSlice, to_device
from titanmoe.parallel.context import Placement
from titanmoe.train.objectives.cross_entropy import CrossEntropy
from titanmoe.train.objectives.objective import Objective

SampleLoss = Callable[[Tensor, Batch], Tensor]
"""An objective of your own: a function of the log-probabilities of the labels (B, L) of a microbatch, 0 where there is
no label, and of its Batch on the same device. It returns the sum of the loss over these samples, a scalar."""


class OfLogProbs(CrossEntropy):
    """Objective that calls a user's function with the labels' log-probabilities of full samples, gathered over cp."""

    def __init__(self, meshes: Meshes, placement: Placement, device: torch.device, function: SampleLoss):
        super().__init__(meshes)
        self.placement, self.device, self.function = placement, device, function
        self.batches: dict[int, Batch] = {}
        """Full samples of the microbatches of a pass, by the id of their slice. The caller sets them before it."""

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        cp, batch = self.meshes.cp, self.batches[id(batch_slice)]
        log_p_BL = self.placement.to_sequence_order(all_gather_autograd(-head.loss_BS, 1, cp))
        fields = (x if x is None else to_device(x, self.device) for x in batch[:-1])
        extra_fields = {name: to_device(x, self.device) for name, x in batch.extra_fields.items()}
        loss = self.function(log_p_BL, Batch(*fields, extra_fields))
        return loss / cp.size  # all cp ranks have computed it, and their gradients are summed


class WithLogProbs(Objective):
    """Objective that has the loss of another objective, and also records each label's log-probability and entropy."""

    def __init__(self, inner: Objective):
        super().__init__(inner.meshes)
        self.inner, self.recorded = inner, dict[int, tuple[Tensor, Tensor | None]]()
        """Log-probabilities (B, S) and entropies (B, S) or None of each microbatch, by the id of its slice."""

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        entropy_BS = None if head.entropy_BS is None else head.entropy_BS.detach()
        self.recorded[id(batch_slice)] = 0 - head.loss_BS.detach(), entropy_BS  # without a label 0, not -0
        return self.inner.sum(head, batch_slice)

    def take_metrics(self, template: Tensor) -> Tensor:
        return self.inner.take_metrics(template)


class NoSum(CrossEntropy):
    """Objective without a loss, for forward passes that only compute log-probabilities."""

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        return head.loss_BS.new_zeros(())
