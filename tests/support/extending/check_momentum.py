"""The optimizer of docs/extending.md, under a mapping and resumed under another, against torch's."""

from pathlib import Path

import pytest
import torch
from titanmoe.train.optimizers.momentum import MomentumSpec

from tests import parity, world
from titanmoe.parallel.grad_norm import local_grad
from titanmoe.train.optimizers.optimizer import Optimizer


class TorchMomentum(Optimizer):
    spec = MomentumSpec()

    def __init__(self, parameters, options):
        super().__init__(parameters, options)
        self.sgd = torch.optim.SGD(self.local_shards.values(), lr=options.lr, momentum=options.beta1)

    def moments(self):
        return {name: {} for name in self.local_shards}

    def step(self, lr, norm):
        self.sgd.param_groups[0]["lr"] = lr
        for name, parameter in self.parameters.items():
            self.local_shards[name].grad = local_grad(parameter)
            parameter.grad = None
        self.sgd.step()


def train(folder, changes, until):
    """Train up to step `until`, from the folder's checkpoint if it has one; save, and return the losses."""
    trainer = parity.make_trainer(changes | {"job.dump_folder": folder, "job.name": "run"})
    with trainer.training.checkpoints.in_folder(Path(folder) / "run") as checkpoints:
        checkpoints.begin()
        losses = []
        while trainer.step < until:
            losses.append(trainer.train_step()["loss"])
        checkpoints.finish()
    return losses


def test_it_equals_torchs_under_a_mapping_and_resumed_under_another(tmp_path):
    alone = {"data.source": "synthetic", "training.global_batch_size": 2, "optimizer.eps": 1e-8}
    alone |= {"optimizer.lr": 0.1, "checkpoint.enable": True, "checkpoint.interval": 0}
    torchs = alone | {"optimizer.name": f"{__name__}:TorchMomentum"}
    (want,) = world.run(1, train, str(tmp_path / "torch"), torchs, 4)
    ours = alone | {"optimizer.name": "momentum"}
    folded = ours | {"parallelism.tp": 2, "parallelism.experts.ep": 2}
    first = world.run(2, train, str(tmp_path / "ours"), folded, 2)[0]
    (rest,) = world.run(1, train, str(tmp_path / "ours"), ours, 4)
    assert first + rest == pytest.approx(want, rel=1e-10) and len(set(want)) == 4
