"""Loss on data that is not trained on: only forward, through the stages and mapping of the run.

It leaves no trace: weights, optimizer, selection biases and the loader are not written to, and the layers' counts are
reset when a step begins. Random numbers are counted, and those of training (jitter) are off.
"""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

import torch

from titanmoe.comm.collectives import all_reduce
from titanmoe.config.schema import Config
from titanmoe.data.loader import Loader, ValidationSet
from titanmoe.fold.meshes import Meshes
from titanmoe.moe.layer import MoE
from titanmoe.parallel.batch_slice import take_slice
from titanmoe.parallel.context import Placement


class TrainerForValidation(Protocol):
    """What a validation needs of a trainer."""

    config: Config
    meshes: Meshes
    device: torch.device
    placement: Placement
    engine: Any
    moe_layers: dict[int, MoE]
    loader: Loader
    step: int

    def count(self, batches: list) -> Any: ...


class Validation:
    def __init__(self, trainer: TrainerForValidation):
        self.trainer, config = trainer, trainer.config
        self.interval, self.last = config.validation.interval, config.training.steps
        data, held_out = trainer.meshes.data, trainer.loader.held_out if config.validation.held_out else ()
        self.set = ValidationSet(config, data.rank, data.size, held_out)
        self.best = math.inf

    def after_step(self) -> dict[str, float]:
        """Loss, perplexity and the best loss so far, if a validation is due."""
        if self.trainer.step % self.interval and self.trainer.step != self.last:
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
        trainer, one = self.trainer, torch.ones((), dtype=torch.float64, device=self.trainer.device)
        total, labels = torch.zeros_like(one), torch.zeros_like(one)
        for batches in self.set:
            counted = trainer.count(batches)
            for moe in trainer.moe_layers.values():
                moe.begin_step(trainer.step, counted.tokens, trainer.loader.global_batch_size)
            where = (trainer.meshes, trainer.placement, trainer.device)
            total += trainer.engine.run(
                [take_slice(batch, m, *where) for m, batch in enumerate(batches)], one, backward=False
            )
            labels += counted.labels
        # Only ranks of the last stage have a loss, and all ranks of a tp group have the same one.
        return (all_reduce(total, trainer.meshes.world) / trainer.meshes.tp.size / labels.clamp(min=1)).item()
