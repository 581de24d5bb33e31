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
from titanmoe.data.loader import ValidationSet
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


@dataclass(eq=False, kw_only=True)
class Validation:
    """Due every `interval` steps, and after step `last`."""

    interval: int
    last: int
    samples: ValidationSet
    slicer: Slicer
    """Without what multi-token prediction needs, and with cross-entropy as its objective, or pairs' own."""
    gradients: Gradients
    state: RunState
    best: float = math.inf

    def after_step(self) -> dict[str, float]:
        """The loss and the best one so far, if a validation is due; the perplexity of cross-entropy, or the objective's
        own metrics."""
        if self.state.step % self.interval and self.state.step != self.last:
            return {}
        begin = time.monotonic()
        loss, metrics = self.measure()
        self.best = min(self.best, loss)
        values = {"val_loss": loss, "val_best": self.best, "val_s": time.monotonic() - begin}
        if metrics:
            return values | metrics
        return values | {"val_perplexity": math.exp(loss) if loss < 700 else math.inf}

    def state_dict(self) -> dict[str, float | None]:
        return {"best": self.best if math.isfinite(self.best) else None}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        best = state.get("best")
        self.best = math.inf if best is None else best

    def measure(self) -> tuple[float, dict[str, float]]:
        """The objective over the whole set, divided by its count once; and its metrics, as those of a step with val_
        before their last name."""
        meshes, objective = self.slicer.meshes, self.slicer.objective
        total, count = (torch.zeros((), dtype=torch.float64, device=self.slicer.device) for _ in range(2))
        sums = objective.take_metrics(total)
        for sum_of_batches, count_of_batches in forward_only(self.samples, self.slicer, self.gradients):
            total += sum_of_batches
            sums += objective.take_metrics(total)
            count += count_of_batches
        # Only ranks of the last stage have a loss, and all ranks of a tp group have the same one.
        mine = torch.cat((total.view(1), sums))
        loss, *values = (all_reduce(mine, meshes.world) / meshes.tp.size / count.clamp(min=1)).tolist()
        names = [name.replace(".", ".val_") for name in objective.metrics]
        return loss + objective.constant, dict(zip(names, values, strict=True))
