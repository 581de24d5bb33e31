"""A step uses DTensor only to get local tensors: its dispatch costs 10 to 100 microseconds per operation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import parity, world
from titanmoe.comm.collectives import local


class _Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.operations[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def operations_of_a_step(changes: dict[str, Any]) -> tuple[Counter[str], int, int]:
    trainer = parity.make_trainer(changes | {"data.source": "synthetic"})
    trainer.train_step()
    with _Counted() as counted:
        trainer.train_step()
    microbatches = trainer.loader.microbatches
    return counted.operations, len(trainer.parameters) * microbatches, len(trainer.moe_layers) * (microbatches - 1)


def test_a_step_asks_dtensor_for_nothing_but_its_local_part() -> None:
    changes = {"parallelism.tp": 2, "parallelism.experts.ep": 2, "model.qk_norm": "full", "model.shared_hidden": 16}
    for operations, uses, further in world.run(4, operations_of_a_step, changes):
        assert set(operations) <= {"aten.detach.default", "aten.add_.Tensor"}
        assert operations["aten.detach.default"] <= 2 * uses
        assert operations["aten.add_.Tensor"] <= further, "a router's gradients of further microbatches"


def gradients_of_pieces() -> list[tuple[bool, bool, tuple[Placement, ...], tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (2,))
    rows = []
    for placement in (Shard(0), Shard(1), Replicate()):
        whole = distribute_tensor(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), mesh, [placement])
        grads = []
        for piece in (local, DTensor.to_local):
            parameter = torch.nn.Parameter(whole.clone())
            for _ in range(2):  # a gradient that is no row-major tensor, then one more microbatch
                (piece(parameter).t() * torch.arange(5)[: piece(parameter).shape[1], None]).t().sin().sum().backward()
            grads.append(parameter.grad)
        ours, torchs = grads
        equal = torch.allclose(ours.to_local(), torchs.to_local()) and ours.placements == torchs.placements
        rows.append((equal, ours.to_local().is_contiguous(), tuple(ours.placements), tuple(ours.shape)))
    return rows


def test_the_gradient_of_a_piece_is_that_of_to_local() -> None:
    for rows in world.run(2, gradients_of_pieces):
        assert rows == [(True, True, (placement,), (6, 5)) for placement in (Shard(0), Shard(1), Replicate())]
