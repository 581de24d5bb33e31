"""Loss on data that is not trained on: only forward, through the stages and mapping of the run.

It leaves no trace: weights, optimizer, selection biases and the loader are not written to, and the layers' counts are
reset when a step begins. Random numbers are counted, and those of training (jitter) are off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titanmoe.comm.collectives import all_reduce
from titanmoe.data.batch import Batch
from titanmoe.train.gradients import Gradients, Slicer
from titanmoe.train.run_state import RunState


def forward_only(
    samples: Iterable[list[Batch]], slicer: Slicer, gradients: Gradients
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each step's batches, the slicer's objective: this rank's sum, and the count over all ranks."""
    one = torch.ones((), dtype=torch.float64, device=slicer.device)
    for batches in samples:
        totals = slicer.count(batches)
        gradients.begin_step(totals)
        yield gradients.engine.run(slicer.slices(batches), slicer.objective, one, backward=False), totals.count


@dataclass(eq=False)
class Validation:
    """Due every `interval` steps, and after step `last`."""

    interval: int
    last: int
    samples: Iterable[list[Batch]]
    slicer: Slicer
    """Without what multi-token prediction needs, and with cross-entropy as its objective."""
    gradients: Gradients
    state: RunState
    best: float = math.inf

    def after_step(self) -> dict[str, float]:
        """Loss, perplexity and the best loss so far, if a validation is due."""
        if self.state.step % self.interval and self.state.step != self.last:
            return {}
        begin = time.monotonic()
        loss = self.loss()
        self.best = min(self.best, loss)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        took = time.monotonic() - begin
        return {"val_loss": loss, "val_perplexity": perplexity, "val_best": self.best, "val_s": took}

    def state_dict(self) -> dict[str, float | None]:
        return {"best": self.best if math.isfinite(self.best) else None}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        best = state.get("best")
        self.best = math.inf if best is None else best

    def loss(self) -> float:
        """Cross entropy, summed over all labels of the set and divided by their number."""
        meshes = self.slicer.meshes
        total, count = (torch.zeros((), dtype=torch.float64, device=self.slicer.device) for _ in range(2))
        for sum_of_batches, count_of_batches in forward_only(self.samples, self.slicer, self.gradients):
            total += sum_of_batches
            count += count_of_batches
        # Only ranks of the last stage have a loss, and all ranks of a tp group have the same one.
        return (all_reduce(total, meshes.world) / meshes.tp.size / count.clamp(min=1)).item()
