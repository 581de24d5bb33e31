"""What the host does for a layer and microbatch, counted on the rank that scripts/bench/host.py times."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanmoe.ops.kernels import installed

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "train_configs/qwen3_30b_a3b.toml")
PARAMETERS = 11
"""Of Qwen3's layer, without its router."""
WIDENED = {"_to_copy": 4} if int(torch.__version__.split(".")[1]) > 14 else {}
"""From torch 2.15 on autograd widens gradients for FSDP: with tp those of a layer's four norms are DTensors."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import host

    yield host
    del sys.modules["host"]


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of_dtensors: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if any(issubclass(one, DTensor) for one in types):
            self.of_dtensors[name] += 1
            return NotImplemented
        self.others[name] += 1
        return func(*args, **kwargs or {})


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.parametrize(
    "changes, dtensors",
    [([], {}), (["parallelism.tp=2", "parallelism.experts.ep=4"], {"detach": PARAMETERS} | WIDENED)],
    ids=["sharded data", "tp 2, ep 4"],
)
def test_a_layer_dispatches_no_dtensor_but_where_autograd_takes_its_gradient(
    host: Any, changes: list[str], dtensors: dict[str, int]
) -> None:
    words = [f"--{word}" for word in ("compile.enable=false", "training.global_batch_size=-1", *changes)]
    _, world, narrow = host.read_configs(RECIPE, words)
    counted = []
    with host.as_rank(world):
        for config in narrow.values():
            run = host.Steps(config, world)
            run.run(1)
            with Dispatches() as dispatches:
                run.run(1)
            counted.append(dispatches)
    (few, many), layers = counted, host.LAYERS[1] - host.LAYERS[0]
    many.of_dtensors.subtract(few.of_dtensors)
    assert {name: count / layers for name, count in many.of_dtensors.items() if count} == dtensors
    # FSDP's own: some 30 with two units, whose weights are gathered twice.
    assert (many.others["_record_function_enter_new"] - few.others["_record_function_enter_new"]) / layers <= 32
