"""Moments on the host: equal to the last bit, whenever the copies are made, and in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import parity, world
from tests.rehearse.small import config_of
from titanmoe.config.schema import Optimizer as Options
from titanmoe.rehearse.rehearsal import rehearse
from titanmoe.train.optimizers import offload
from titanmoe.train.optimizers.adamw import AdamW

SHAPES = {"a": (40, 7), "b": (3,), "c": (0, 5), "d": (200, 9), "e": (64,), "f": (33, 2), "g": (5, 5, 5)}
TURN = 2 * 4 * 200


class Late(offload.Copies):
    """Copies that run only once they are waited for. deaf: copies to it wait for nothing."""

    def __init__(self, deaf: str = ""):
        self.queues: dict[str, list[tuple]] = {"device": [], "host": []}
        self.deaf = deaf

    def copy(self, to: str, target: Tensor, source: Tensor, *after: Any) -> Any:
        self.queues[to].append((target, source, () if to == self.deaf else after))
        return to, len(self.queues[to])

    def wait_on_device(self, event: Any) -> None:
        to, end = event
        for number, job in enumerate(self.queues[to][:end]):
            if job is not None:
                target, source, after = job
                for earlier in after:
                    if earlier is not None:
                        self.wait_on_device(earlier)
                target.copy_(source)
                self.queues[to][number] = None

    wait_on_host = wait_on_device


def stepped(copies: offload.Copies | None, implementation: str, narrow: tuple[str, ...] = ()) -> list[Tensor]:
    """Weights and moments after four steps; copies: None for moments on the device. narrow: which are in bfloat16."""
    generator, dtypes = torch.Generator().manual_seed(0), dict.fromkeys(narrow, torch.bfloat16)
    start = {name: torch.randn(s, generator=generator).to(dtypes.get(name)) for name, s in SHAPES.items()}
    parameters = {name: nn.Parameter(x) for name, x in start.items()}
    optimizer = AdamW(parameters, Options(implementation=implementation))
    if copies is not None:
        optimizer.offload = offload.Offload(optimizer.local_shards, copies)
        assert len(optimizer.offload.buckets) > offload.BUFFERS
    for step in range(4):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step(0.1 / (step + 1))
        assert all(parameter.grad is None for parameter in parameters.values())
    moments = [x for both in optimizer.moments().values() for x in both.values()]
    return [*(p.detach() for p in parameters.values()), *(x.clone() for x in moments)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_late_copies_change_no_bit(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUCKET_BYTES", TURN)
    want = stepped(None, implementation)
    assert equal(stepped(offload.Copies(), implementation), want)
    assert equal(stepped(Late(), implementation), want)
    assert not equal(stepped(Late(deaf="device"), implementation), want), "the test would not notice"


def test_moments_are_as_wide_as_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With training.dtype = "bfloat16" routers are float32."""
    monkeypatch.setattr(offload, "BUCKET_BYTES", TURN // 2)
    assert equal(stepped(offload.Copies(), "fused", ("a", "d", "g")), stepped(None, "fused", ("a", "d", "g")))


def test_what_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUCKET_BYTES", TURN)
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = AdamW(parameters, Options(offload=True))
    optimizer.moments()
    assert sum(x.nbytes for x in optimizer.host_tensors) >= 2 * sum(p.nbytes for p in parameters.values())
    largest = max(bucket.host.nbytes for bucket in optimizer.offload.buckets)
    assert sum(x.nbytes for x in optimizer.device_tensors) == offload.BUFFERS * largest + 4 * len(parameters)


def run(folder: str, on: list[bool]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a step for each entry of `on`, each a start from the last checkpoint; and this rank's tensors."""
    changes = {"job.dump_folder": folder, "job.name": "run", "data.source": "synthetic", "parallelism.tp": 2}
    changes |= {"model.num_layers": 1}
    changes |= {"parallelism.experts.ep": 2, "training.global_batch_size": 2, "training.dtype": "float32"}
    changes |= {"training.mixed_precision_param": "float32", "training.mixed_precision_reduce": "float32"}
    changes |= {"checkpoint.enable": True, "checkpoint.interval": 0, "optimizer.implementation": "fused"}
    losses, before = [], offload.BUCKET_BYTES
    offload.BUCKET_BYTES = 1 << 12
    try:
        for start, offloaded in enumerate(on):
            trainer = parity.make_trainer(changes | {"optimizer.offload": offloaded})
            with trainer.training.checkpoints.in_folder(Path(folder) / "run") as checkpoints:
                checkpoints.begin()
                assert trainer.step == start
                losses.append(trainer.train_step()["loss"])
                checkpoints.finish()
            assert (trainer.training.optimizer.offload is not None) == offloaded
    finally:
        offload.BUCKET_BYTES = before
    moments = trainer.training.optimizer.moments()
    found = {f"{name} {key}": x.clone() for name, both in moments.items() for key, x in both.items()}
    return losses, found | {name: x.detach().clone() for name, x in trainer.training.optimizer.local_shards.items()}


def test_checkpoints_do_not_know_of_it(tmp_path: Path) -> None:
    """Begun with it and gone on without, and the other way round: equal to the last bit."""
    plain = world.run(2, run, str(tmp_path / "plain"), [False, False, False])
    mixed = world.run(2, run, str(tmp_path / "mixed"), [True, False, True])
    for (losses, tensors), (wanted, expected) in zip(mixed, plain, strict=True):
        assert losses == wanted and len(set(losses)) == 3
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_a_rehearsal_has_the_moments_off_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUCKET_BYTES", 1 << 12)
    on, off = (rehearse(config_of({"optimizer.offload": is_on}, 1, "h100"), 1, 0, "h100") for is_on in (True, False))
    assert on.optimizer_bytes < off.optimizer_bytes / 2
    assert off.memory.peak - on.memory.peak == off.optimizer_bytes - on.optimizer_bytes
    assert on.memory.components["moments"] == on.optimizer_bytes
