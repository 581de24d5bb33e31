"""Interface of a training objective: a sum over labels, and the divisor of it.

The step's loss is the sum over all microbatches and ranks, divided once by the divisor, the sum of what `count`
returns for each. Only ranks with the last pipeline stage have a sum, and all ranks of a tp group have the same; each cp
rank has some of a sample's labels.
If the loss of a sample is not a sum over its labels, as in DPO, `sum` first adds up each sample's labels over the cp
ranks (titanmoe.comm.collectives.all_reduce_autograd), and then returns the loss divided by meshes.cp.size.

Shapes: N numbers of the head for each label, B samples, S positions of the attention slice.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.fold.meshes import Meshes
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.parallel.batch_slice import BatchSlice


class Objective:
    """Base class of objectives; a subclass defines `sum` and `count`, whose quotient over a step is the loss."""

    metrics: tuple[str, ...] = ()
    """Names of the metrics besides the loss, such as "preference.accuracy"; their sums are divided as the loss is."""
    constant = 0.0
    """Constant that is added to the reported loss; `sum` leaves it out, so that no division rounds it."""

    def __init__(self, meshes: Meshes):
        self.meshes, self._sums = meshes, {}

    @classmethod
    def build(cls, config: Config, meshes: Meshes) -> Objective:
        """Make the objective of a run; a subclass with options overrides this and reads them from the config."""
        return cls(meshes)

    def __call__(self, output_NBS: Tensor, batch_slice: BatchSlice) -> Tensor:
        """Return `sum` of this rank's slice of a microbatch, with the head's numbers as a HeadOutput."""
        return self.sum(HeadOutput.of(output_NBS), batch_slice)

    def report(self, batch_slice: BatchSlice, *sums: Tensor) -> None:
        """Record this rank's sums of a microbatch for the metrics named in `metrics`. Called by a subclass's `sum`.

        A second forward over the same microbatch replaces the sums of the first, and does not add to them. The sums are
        later added over microbatches and ranks, and divided by the step's divisor. Not collective.

        Args:
            batch_slice: the microbatch, which only identifies it.
            sums: scalar tensors, in the order of `metrics`.
        """
        self._sums[id(batch_slice)] = torch.stack(sums).detach().double()

    def take_metrics(self, template: Tensor) -> Tensor:
        """Return this rank's sums since the last call, a vector in the order of `metrics`, and reset them to 0.

        Args:
            template: tensor whose device and dtype the zeros have that ranks without the head return; sums are float64.
        """
        sums, self._sums = sum(self._sums.values(), template.new_zeros(len(self.metrics))), {}
        return sums

    @abstractmethod
    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        """Return this rank's sum of the loss over a microbatch, a scalar that gradients flow through.

        Args:
            head: what the head has computed of each label: cross-entropy, and entropy or classes if asked for.
            batch_slice: ids, labels, positions and further inputs of the same positions.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `sum`")

    @abstractmethod
    def count(self, batch: Batch) -> Tensor:
        """Return what a microbatch adds to the divisor of the loss, such as its number of labels, a scalar on the host.

        The microbatch is a data rank's, not sliced over cp and tp.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `count`")
