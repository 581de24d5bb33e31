"""A step uses DTensor only to get local tensors: its dispatch costs 10 to 100 microseconds per operation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import parity, world
from titanmoe.comm.collectives import to_local


class _Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.operations[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def operations_of_a_step(changes: dict[str, Any]) -> tuple[Counter[str], int]:
    trainer = parity.make_trainer(changes | {"data.source": "synthetic", "training.global_batch_size": 4})
    trainer.train_step()
    with _Counted() as counted:
        trainer.train_step()
    return counted.operations, len(trainer.training.parameters) * trainer.training.loader.microbatches


def test_a_step_asks_dtensor_for_nothing_but_its_local_part() -> None:
    changes = {"parallelism.tp": 2, "parallelism.experts.ep": 2, "model.qk_norm": "full", "model.shared_hidden": 16}
    for operations, uses in world.run(4, operations_of_a_step, changes):
        assert set(operations) <= {"aten.detach.default"}
        assert operations["aten.detach.default"] <= 2 * uses


def gradients_of_pieces() -> list[tuple[bool, bool, tuple[Placement, ...], tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (2,))
    rows = []
    for placement in (Shard(0), Shard(1), Replicate()):
        whole = distribute_tensor(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), mesh, [placement])
        parameter, plain = torch.nn.Parameter(whole), torch.nn.Parameter(whole.to_local().clone())
        for _ in range(2):  # a gradient that is no row-major tensor, then one more microbatch
            for piece in (to_local(parameter), plain):
                (piece.t() * torch.arange(5)[: piece.shape[1], None]).t().sin().sum().backward()
        found = parameter.grad.to_local()
        placed = tuple(parameter.grad.placements), tuple(parameter.grad.shape)
        rows.append((torch.allclose(found, plain.grad), found.is_contiguous(), *placed))
    return rows


def test_the_gradient_of_a_piece_is_that_of_a_plain_tensor() -> None:
    for rows in world.run(2, gradients_of_pieces):
        assert rows == [(True, True, (placement,), (6, 5)) for placement in (Shard(0), Shard(1), Replicate())]
