"""Distillation: a weighted sum of the KL divergence from a teacher's distribution and cross-entropy, over labels.

    w t^2 sum p (log p - log q) + (1 - w) CE

The teacher's p and the model's q are distributions at temperature t over the teacher's top-k ids of each position and
one more class for all other ids. The factor t^2 keeps the size of gradients independent of the temperature (Hinton et
al., arXiv 1503.02531). With K = vocab_size this is the full KL divergence.

Shapes: B samples, S positions of the attention slice, K top-k ids, C = K + 1 classes.
"""

from __future__ import annotations

from torch import Tensor

from titanmoe.config.schema import Config, Distillation
from titanmoe.data.batch import TEACHER_LOG_P
from titanmoe.fold.meshes import Meshes
from titanmoe.models.vocabulary import HeadOutput
from titanmoe.parallel.batch_slice import BatchSlice
from titanmoe.tokens import IGNORE
from titanmoe.train.objectives.cross_entropy import CrossEntropy


class DistillationObjective(CrossEntropy):
    """Objective of distillation: weighted sum of the KL divergence from the teacher and cross-entropy."""

    def __init__(self, meshes: Meshes, options: Distillation):
        super().__init__(meshes)
        self.weight, self.temperature = options.weight, options.temperature

    @classmethod
    def build(cls, config: Config, meshes: Meshes) -> DistillationObjective:
        return cls(meshes, config.distillation)

    def sum(self, head: HeadOutput, batch_slice: BatchSlice) -> Tensor:
        log_p_CBS = batch_slice.extra_fields[TEACHER_LOG_P].movedim(-1, 0)
        # A class that the teacher has nothing in adds nothing, if the model's is empty too: nothing, not 0 * -inf.
        p_CBS = log_p_CBS.exp() * (batch_slice.labels_BS != IGNORE)
        some_CBS = p_CBS > 0
        apart_CBS = log_p_CBS.where(some_CBS, 0) - head.classes_CBS.where(some_CBS, 0)
        divergence = (p_CBS * apart_CBS).sum() * self.temperature**2
        return self.weight * divergence + (1 - self.weight) * head.loss_BS.sum()
