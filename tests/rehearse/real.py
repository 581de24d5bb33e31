"""What real ranks send in a step, as the recorder of rehearsals sees it, and the same from a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.utils._python_dispatch import _disable_current_modes

from tests import parity
from tests.parity import Choices
from tests.rehearse.small import Comparable, comparable, config_of
from titanmoe.data.batch import Batch
from titanmoe.moe.dispatchers.symmetric_buffers import Buffers, SymmetricBuffers
from titanmoe.moe.router import Router
from titanmoe.observe import Observer, listening
from titanmoe.ops.device import HARDWARE, imitate
from titanmoe.parallel.grad_norm import local_grad
from titanmoe.rehearse.assumed_routing import AssumedRouting
from titanmoe.rehearse.message_recorder import Recorder
from titanmoe.rehearse.rehearsal import FakeLoader, Rehearsal, name_groups, rehearse


class Varied(FakeLoader):
    """Tokens that differ, so that learned routing sends them to different experts."""

    def next_step(self) -> list[Batch]:
        vocabulary, layout = 48, self.layout
        return [
            batch._replace(tokens_BS=torch.randint(vocabulary, batch.tokens_BS.shape, generator=_seeded(layout, m)))
            for m, batch in enumerate(super().next_step())
        ]


def _seeded(layout: Any, microbatch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * layout.data_rank + microbatch)


class Real(NamedTuple):
    messages: Comparable
    weights: int
    gradients: int
    moments: int
    """Bytes."""
    choices: Choices


@contextmanager
def recorded_choices(choices: dict[int, dict[int, Tensor]]) -> Iterator[None]:
    """Stores what every router chooses, by layer and token."""
    real = Router._choose

    def choose(self: Router, scores_TE: Tensor, index_T: Tensor) -> Tensor:
        chosen_TK = real(self, scores_TE, index_T)
        choices.setdefault(self.layer, {}).update(zip(index_T.tolist(), chosen_TK, strict=True))
        return chosen_TK

    with mock.patch.object(Router, "_choose", choose):
        yield


def allocate_here(self: SymmetricBuffers, *sizes: Any) -> Buffers:
    """Allocate receive buffers on this machine, whatever hardware the code is for."""
    with imitate(HARDWARE["cpu"]):
        return _allocate(self, *sizes)


_allocate = SymmetricBuffers.allocate
FIRST_CONTACT = {14: "_warmup_p2p", 15: "_initialize_pipeline_distributed_state"}
"""Methods by which the stages of a pipeline exchange a few numbers before the first step, by torch's minor version."""


@contextmanager
def unseen_connections() -> Iterator[None]:
    """Hide from the recorder what real stages exchange before the first step; from torch 2.14 on fake ones do not."""
    name = FIRST_CONTACT.get(int(torch.__version__.split(".")[1]), "")
    connect = getattr(_PipelineSchedule, name, None)

    def unseen(*args: Any) -> None:
        with _disable_current_modes():
            connect(*args)

    with mock.patch.object(_PipelineSchedule, name, unseen) if connect else nullcontext():
        yield


def measured(changes: dict[str, Any], hardware: str, steps: int = 1) -> Real:
    """On a rank of a real world: its messages in the last of `steps` steps, and the experts that were chosen in it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = config_of(changes, world, hardware)
    mine: dict[int, dict[int, Tensor]] = {}
    gradients: list[int] = []

    class CountBytes(Observer):
        def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
            grads = (local_grad(p) for p in parameters.values())
            gradients.append(sum(g.numel() * g.element_size() for g in grads))

    allocated_here = mock.patch.object(SymmetricBuffers, "allocate", allocate_here)
    with imitate(HARDWARE[hardware]) if hardware != "cpu" else nullcontext(), recorded_choices(mine), allocated_here:
        runtime = parity.runtime_here()
        trainer = parity.build_trainer(config, runtime, loader=Varied, garbage=parity.no_collection)
        layers = {id(block): f"layers.{i}" for part in trainer.training.stages for i, block in part.blocks().items()}
        for _ in range(steps - 1):
            trainer.train_step()
        mine.clear()
        recorder = Recorder(layers, hardware != "cpu")
        with recorder.recording(), unseen_connections(), listening(CountBytes()):
            trainer.train_step()
    state = trainer.training.optimizer.device_tensors
    return Real(
        comparable(recorder.log, name_groups(trainer.training.meshes.communicators, trainer.training.fold, rank, 8)),
        sum(p.numel() * p.element_size() for p in trainer.training.optimizer.local_shards.values()),
        gradients[-1],
        sum(x.numel() * x.element_size() for x in state),
        {layer: (torch.tensor(list(of)), torch.stack(list(of.values()))) for layer, of in mine.items()},
    )


def recorded_routing(config: Any, ranks: list[Real]) -> AssumedRouting:
    """The routing that these ranks recorded, combined."""
    by_layer: dict[int, Tensor] = {}
    for layer in {layer for real in ranks for layer in real.choices}:
        parts = [real.choices[layer] for real in ranks if layer in real.choices]
        index, experts = (torch.cat(x) for x in zip(*parts, strict=True))
        by_layer[layer] = experts.new_full((int(index.max()) + 1, experts.shape[1]), -1).index_copy(0, index, experts)
        assert (by_layer[layer] >= 0).all()
    return AssumedRouting("as recorded", lambda layer, index_T: by_layer[layer][index_T], by_layer=True)


def rehearsed(changes: dict[str, Any], world: int, rank: int, hardware: str, real: list[Real], steps: int) -> Rehearsal:
    config = config_of(changes, world, hardware)
    routing = 1.0 if config.moe.force_balance else recorded_routing(config, real)
    return rehearse(config, world, rank, hardware, routing=routing, steps=steps)
