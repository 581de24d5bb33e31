"""What real ranks send in a step, noted by the recorder of rehearsals, and the same from a rehearsal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tests import parity
from titanmoe.config.schema import Config
from titanmoe.ops.device import as_on
from titanmoe.rehearse.hardware import HARDWARE
from titanmoe.rehearse.record import Log, Recorder
from titanmoe.rehearse.samples import Samples
from titanmoe.rehearse.world import Named, Rehearsal, name_groups, read, rehearse

Told = list[tuple[Any, ...]]
FORCED = {"moe.force_balance": True, "training.dtype": "float32", "training.mixed_precision_param": "float32"}
FORCED |= {"training.mixed_precision_reduce": "float32", "moe.kernels": "torch"}


def config_of(changes: dict[str, Any], world: int, hardware: str) -> Config:
    return read(parity.arguments(parity.TINY | FORCED | changes), world, hardware)


def told(log: Log, groups: dict[str, Named]) -> Told:
    """Every message in the order of the host, and where it was waited for, with all that can be compared."""
    out: Told = []
    for kind, number in log.events:
        if kind == "sync":
            continue
        m = log.messages[number]
        if kind == "issue":
            group = groups[m.group]
            what = m.op, str(m.dtype), m.sent, m.received, m.splits, m.peer, m.batch >= 0
            out.append((group.lane, group.axes, group.ranks, *what, m.backward, m.waited, *m.line))
        else:
            out.append(("waits for", number))
    return out


def measured(changes: dict[str, Any], hardware: str) -> tuple[Told, int, int]:
    """On a rank of a real world: its messages of the second step, and the bytes of its weights and moments."""
    from titanmoe.train.runtime import Runtime
    from titanmoe.train.trainer import Trainer

    rank, world = dist.get_rank(), dist.get_world_size()
    config = config_of(changes, world, hardware)
    ways = as_on(HARDWARE[hardware]) if hardware != "cpu" else nullcontext()
    with ways:
        trainer = Trainer(config, Runtime(rank, rank, world, torch.device("cpu")), loader=Samples)
        layers = {id(block): f"layers.{i}" for part in trainer.parts for i, block in part.blocks().items()}
        trainer.train_step()
        recorder = Recorder(layers, hardware != "cpu")
        if trainer.engine.pairs is not None:
            from titanmoe.rehearse.world import _in_other_thread

            _in_other_thread(trainer, [recorder])
        with recorder.on():
            trainer.train_step()
    state = [x for of in trainer.optimizer.adamw.state.values() for x in of.values()]
    weights = sum(p.numel() * p.element_size() for p in trainer.optimizer.pieces.values())
    moments = sum(x.numel() * x.element_size() for x in state)
    return told(recorder.log, name_groups(trainer.meshes.lanes, trainer.fold, rank, 8)), weights, moments


def rehearsed(changes: dict[str, Any], world: int, rank: int, hardware: str) -> Rehearsal:
    return rehearse(config_of(changes, world, hardware), world, rank, hardware, steps=2)
