"""A step uses DTensor only to get local tensors: its dispatch costs 10 to 100 microseconds per operation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import parity, world


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
