"""What a step learns of its gradients travels by name, and a dispatcher may ask for the step to be repeated."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests import parity, world
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.moe.dispatchers.dispatcher import SharedBuffers
from titanmoe.moe.dispatchers.dispatcher_spec import AllToAllSpec
from titanmoe.train import gradients
from titanmoe.train.gradients import sum_together, to_host


class AskingSpec(AllToAllSpec):
    implementation = ""  # the class that has this spec


class Asking(AllToAll):
    """Is wrong with its buffers, and rank 0 alone says so."""

    spec = AskingSpec()

    @staticmethod
    def reserve(model: Any, options: Any, ranks: Any, tokens: int, dtype: Any, device: torch.device) -> SharedBuffers:
        return SharedBuffers(device)

    def dispatch(self, x_TD: Tensor, *routing: Any) -> Any:
        if self.memory is not None:
            x_TD = 2 * x_TD
            self.memory.needs_repeat.fill_(dist.get_rank() == 0)
        return super().dispatch(x_TD, *routing)


def two_steps(changes: dict[str, Any]) -> tuple[list[dict[str, Any]], int, int]:
    """On a rank: the reports, how many steps were repeated, and how many messages were sent for what has names."""
    trainer = parity.make_trainer(changes, loader=parity.samples())
    with mock.patch.object(gradients, "sum_together", wraps=sum_together) as messages:
        reports = [trainer.train_step() for _ in range(2)]
    buffers = trainer.training.gradients.first_pass
    return reports, buffers.repeats if buffers else 0, messages.call_count


def test_a_dispatcher_asks_for_a_step_to_be_repeated_without_its_buffers() -> None:
    changes = {"training.global_batch_size": 2, "parallelism.experts.ep": 2}
    asking = world.run(2, two_steps, changes | {"moe.dispatcher": f"{__name__}:Asking"})
    for (got, repeats, messages), (want, none, one_each) in zip(asking, world.run(2, two_steps, changes), strict=True):
        assert got == want
        assert (repeats, messages) == (2, 2 + 4) and (none, one_each) == (0, 2 + 2), "a count of the batch, and passes"


def test_named_tensors_keep_their_names_and_shapes() -> None:
    values = {
        "a": torch.tensor(1, dtype=torch.int64),
        "none": torch.zeros(0),
        "b": torch.tensor([0.5, 2.0]),
        "c": torch.tensor(3.25, dtype=torch.float64),
    }
    summed = sum_together(values, NO_GROUP)
    assert {name: value.shape for name, value in summed.items()} == {name: x.shape for name, x in values.items()}
    assert all(value.dtype == torch.float64 for value in summed.values())
    assert to_host(summed) == {"a": 1.0, "none": [], "b": [0.5, 2.0], "c": 3.25}
