"""The host waits for the device once per step, for numbers that it gets between the gradients and the update, and
where a dispatcher asks for sizes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import parity
from tests.rehearse.small import config_of
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.moe.dispatchers.symmetric_buffers import SymmetricBuffers
from titanmoe.parallel.context import Placement
from titanmoe.parallel.grad_norm import grad_norm
from titanmoe.rehearse.rehearsal import rehearse
from titanmoe.train.gradients import Slicer
from titanmoe.train.objectives.cross_entropy import CrossEntropy

ONE = {"model.num_layers": 2, "training.global_batch_size": 4, "parallelism.experts.ep": 4, "moe.bias_update_rate": 0.1}
ONE |= {"training.mixed_precision_param": "bfloat16", "moe.force_balance": False}
LAYERS_AND_MICROBATCHES = 2 * 1
PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "alltoall": ({}, LAYERS_AND_MICROBATCHES),
    "alltoall, padded": (PADDED, 0),
    "padded, every term and extra": (
        PADDED
        | {"moe.aux_loss": 0.1, "moe.aux_loss_global": 0.1, "moe.z_loss": 0.1, "model.mtp_depth": 1}
        | {"model.num_layers": 1, "model.tie_embeddings": True, "parallelism.tp": 2, "optimizer.max_grad_norm": 0.1}
        | {"optimizer.skip_spikes": 6.0},
        0,
    ),
    "symm_mem": ({"moe.dispatcher": "symm_mem"}, 0),
    "padded, in a pipeline": (PADDED | {"parallelism.pp": 2, "parallelism.experts.ep": 2}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_one_host_sync_besides_its_dispatchers(name: str) -> None:
    changes, dispatched = CASES[name]
    # The second step: before the first, torch's stages ask each other for their shapes.
    with mock.patch.object(SymmetricBuffers, "check_first_exchange"):
        log = rehearse(config_of(ONE | changes, 4, "h100"), 4, 0, "h100", steps=2).log
    want = {"train/gradients.py": 1} | ({"moe/dispatchers/alltoall.py": dispatched} if dispatched else {})
    assert Counter(line.file for line in log.syncs) == want
    # It is the last, and nothing is sent after it: all ranks know the same.
    assert log.syncs[-1].file == "train/gradients.py" and log.events[-1].kind == "sync"


class _Waits(TorchDispatchMode):
    """Copies to the device (here meta) for which the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op._overloadpacket.__name__
        away = name == "_to_copy" and not args[0].is_meta and str(kwargs.get("device")) == "meta"
        if away and not kwargs.get("non_blocking"):
            self.found.append(name)
        return op(*args, **kwargs)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_batch_reaches_the_device_while_the_host_goes_on(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = parity.read({"model.mtp_depth": depth}, 1), torch.device("meta")
    batches = [parity.batch(config, [m], documents=True) for m in range(2)]
    meshes: Any = SimpleNamespace(tp=NO_GROUP, cp=NO_GROUP, data=NO_GROUP)
    slicer = Slicer(
        meshes=meshes, placement=Placement(1, False), device=device, with_mtp=depth > 0, objective=CrossEntropy(meshes)
    )
    monkeypatch.setattr(torch, "tensor", None)  # with a device it waits too, and no mode sees it
    with _Waits() as waits:
        totals, slices = slicer.count(batches), slicer.slices(batches)
    assert totals.divisor.is_meta and all(s.ids_BS.is_meta and s.tokens.microbatch.is_meta for s in slices)
    assert not waits.found


def test_the_norm_sends_nothing_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        parameters = {name: torch.nn.Parameter(torch.empty(4, 3)) for name in "ab"}
        for parameter in parameters.values():
            parameter.grad = torch.empty_like(parameter)
    monkeypatch.setattr(torch, "tensor", None)
    with _Waits() as waits:
        assert grad_norm(parameters, NO_GROUP, ("a",)).is_meta
    assert not waits.found
