"""Weights are prefetched before the host waits for the dispatcher: shown by the order of a step's collectives."""

from __future__ import annotations

from itertools import groupby
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import parity, world
from titanmoe.ops.cpu.fsdp import DirectAllGather

# 4 data ranks for attention, 2 for the experts of each of 2 ranks.
MAPPING = {"model.vocab_size": 320, "model.num_layers": 3, "parallelism.experts.ep": 2}


class _Order(TorchDispatchMode):
    """Records gathers of weights, by the number of elements of this rank's piece, and all-to-alls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        gather = DirectAllGather.__call__

        def recorded(
            unit: DirectAllGather, output_tensor: Tensor, input_tensor: Tensor, *given: Any, **named: Any
        ) -> Any:
            self.seen.append(input_tensor.numel())
            return gather(unit, output_tensor, input_tensor, *given, **named)

        self.patch = mock.patch.object(DirectAllGather, "__call__", recorded)

    def __enter__(self) -> _Order:
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patch.stop()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op._overloadpacket.__name__ == "all_to_all_single":
            self.seen.append("rows")
        return op(*args, **(kwargs or {}))


def orders(changes: dict[str, Any]) -> list[list[list[Any]]]:
    """Forward and backward of the first microbatch of two steps; repeated messages are listed once."""
    from torch.distributed.tensor import DTensor

    trainer = parity.make_trainer(MAPPING | changes)
    (part,) = trainer.training.stages

    def elements(module: Any) -> int:
        return sum(p.numel() for p in module.parameters() if isinstance(p, DTensor))

    block = part.layers["1"]
    experts, router = elements(block.moe.experts), elements(block.moe.router)
    rest = elements(block) - experts - router
    wholes = {elements(part.embed): "embed", elements(part.head): "head", rest: "block"}
    names = {whole // trainer.training.fold.dp_shard: name for whole, name in wholes.items()}
    names[experts // trainer.training.fold.ep // trainer.training.fold.edp] = "experts"
    assert len(names) == 4
    found, run = [], trainer.training.gradients.engine.run

    def split(slices: Any, microbatch_loss: Any, backward: bool) -> Any:
        (first, *others) = slices
        with _Order() as in_forward:
            loss = microbatch_loss(trainer.training.gradients.engine.model(*first[:3]), first)
        with _Order() as in_backward:
            loss.backward()
        found.append([[names.get(x, x) for x, _ in groupby(order.seen)] for order in (in_forward, in_backward)])
        return run(others, microbatch_loss, backward) + loss.detach()

    trainer.training.gradients.engine.run = split
    trainer.train_step()
    trainer.train_step()
    return found


@pytest.mark.parametrize("mode", ["none", "full"])
def test_weights_are_asked_for_before_the_counts(mode: str) -> None:
    """Also with recomputation, where the rows are counted again before the experts' backward."""
    ahead = ["block", "experts", "block", "rows", "experts", "block", "rows", "experts"]
    for steps in world.run(4, orders, {"activation_checkpoint.mode": mode}):
        for forward, backward in steps:
            assert forward == ["embed", *ahead, "head", "rows"]
            # The head is still there, and a lookup's gradient needs no weights.
            assert backward == [*ahead, "rows"]


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpoint.mode": "moe", "model.moe_every": 2, "model.dense_hidden": 16, "model.num_layers": 3},
        {"parallelism.reshard_after_forward": "never", "model.mtp_depth": 1, "parallelism.dp_replicate": 2},
        {"parallelism.pp": 2, "parallelism.reshard_after_forward": "always"},
    ],
    ids=["recomputed", "replicas", "pipeline"],
)
def test_weights_asked_for_early_are_those_of_the_step(changes: dict[str, Any]) -> None:
    parity.check(4, {"parallelism.experts.ep": 1 if "parallelism.pp" in changes else 2} | changes)
