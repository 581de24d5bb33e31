"""Training runs that save and resume, on the ranks of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import parity
from titanmoe.train.optimizers.optimizer import Optimizer
from titanmoe.train.optimizers.optimizer_spec import OptimizerSpec

SAVED, LAST = 1, 2
# The real loader over counted random tokens; every mapping of 8 ranks with few enough data ranks is legal.
RUN: dict[str, Any] = {
    "training.global_batch_size": 4,
    "data.source": "synthetic",
    "training.deterministic": True,
    "moe.aux_loss_sequence": 0.02,
    "moe.bias_update_rate": 0.01,
    "checkpoint.enable": True,
    "checkpoint.interval": SAVED,
    "checkpoint.keep_last": 0,
    "job.name": "run",
}


class Still(Optimizer):
    """Leaves the weights as they are."""

    spec = OptimizerSpec()

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: {} for name in self.local_shards}

    def step(self, lr: float, norm: torch.Tensor) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


@dataclass
class Went:
    """What rank 0 saw of a run."""

    loss: dict[int, float] = field(default_factory=dict)
    norm: dict[int, float] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights, expert biases and moments after the last step, whole."""
    notes: dict[str, str] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)


def go(folder: str, changes: dict[str, Any], until: int, saves: int = SAVED) -> Went:
    """Start as the config says, train until a step, and save as the config says up to step `saves`."""
    trainer = parity.make_trainer(RUN | {"job.dump_folder": folder} | changes)
    went = Went()
    with trainer.training.checkpoints.in_folder(Path(folder) / "run") as checkpoints:
        went.notes = checkpoints.begin()
        while trainer.step < until:
            report = trainer.train_step()
            went.loss[trainer.step], went.norm[trainer.step] = report["loss"], report["grad_norm"]
            if trainer.step <= saves:
                checkpoints.after_step()
        checkpoints.wait()
    went.loader = trainer.training.loader.state_dict()
    went.state = parity.whole(everything(trainer), dist.get_rank(), trainer.training.fold)
    copies = ("head.weight",) * changes.get("model.tie_embeddings", False) + ("embed_copy.weight",)
    went.state = {name: tensor for name, tensor in went.state.items() if not name.endswith(copies)}
    return went


def everything(trainer: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    out = dict(trainer.training.parameters) | trainer.training.buffers
    for name, moments in trainer.training.optimizer.moments().items():
        like = trainer.training.parameters[name]
        for moment, tensor in moments.items():
            out[f"{moment}.{name}"] = DTensor.from_local(
                tensor, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
            )
    return out
