"""What an objective is: a sum, made from what the head says of each label, and the number that it is divided by.

The step's loss is the sum over all microbatches and ranks divided by the count over all of them, once. Only ranks with
the last pipeline stage have a sum, and all ranks of a tp group the same one; cp ranks have parts of a sample each.

Where the loss of a sample is no sum over its labels, such as that of a pair of answers (DPO), `sum` first adds up each
sample's labels, over the cp ranks too (`sum_over` in titanmoe.comm.collectives, with gradients), then returns this cp
rank's share: the loss of the pair / meshes.cp.size. `count` is then the number of pairs.

Shapes: B samples, S positions of the attention slice.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from titanmoe.config.schema import Config
from titanmoe.data.batch import Batch
from titanmoe.fold.meshes import Meshes
from titanmoe.models.vocabulary import Scores
from titanmoe.parallel.batch_slice import Slice


class Objective:
    metrics: tuple[str, ...] = ()
    """Names of what it reports besides the loss, such as "preference.accuracy": sums that are divided as the loss is.
    """
    constant = 0.0
    """What the reported loss has besides: `sum` may leave it out, so that no division rounds it."""

    def __init__(self, meshes: Meshes):
        self.meshes, self._sums = meshes, {}

    @classmethod
    def build(cls, config: Config, meshes: Meshes) -> Objective:
        """Of a run; one with options of its own reads them here."""
        return cls(meshes)

    def __call__(self, scores_NBS: Tensor, piece: Slice) -> Tensor:
        return self.sum(Scores.of(scores_NBS), piece)

    def report(self, piece: Slice, *sums: Tensor) -> None:
        """This rank's sums of a microbatch, one for each of `metrics`; called by `sum`. They replace those of an
        earlier pass over the same microbatch."""
        self._sums[id(piece)] = torch.stack(sums).detach().double()

    def take_metrics(self, like: Tensor) -> Tensor:
        """The sums since the last call, zeros on ranks without the head."""
        sums, self._sums = sum(self._sums.values(), like.new_zeros(len(self.metrics))), {}
        return sums

    @abstractmethod
    def sum(self, scores: Scores, piece: Slice) -> Tensor:
        """This rank's sum over a microbatch, with gradients. piece: ids, labels, places and further numbers of the same
        positions."""
        raise NotImplementedError(f"{type(self).__name__} has no method `sum`")

    @abstractmethod
    def count(self, batch: Batch) -> Tensor:
        """Of whole samples, before they are cut for cp and tp, on the host."""
        raise NotImplementedError(f"{type(self).__name__} has no method `count`")
