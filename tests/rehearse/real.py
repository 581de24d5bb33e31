"""What real ranks send in a step, noted by the recorder of rehearsals, and the same from a rehearsal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests import parity
from tests.rehearse.small import Told, config_of, told
from titanmoe.ops.device import as_on
from titanmoe.rehearse.hardware import HARDWARE
from titanmoe.rehearse.record import Recorder
from titanmoe.rehearse.samples import Samples
from titanmoe.rehearse.world import Rehearsal, _in_other_thread, name_groups, rehearse
from titanmoe.train.trainer import Trainer


def measured(changes: dict[str, Any], hardware: str) -> tuple[Told, int, int]:
    """On a rank of a real world: its messages of the second step, and the bytes of its weights and moments."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = config_of(changes, world, hardware)
    with as_on(HARDWARE[hardware]) if hardware != "cpu" else nullcontext():
        trainer = Trainer(config, parity.runtime_here(), loader=Samples, garbage=parity.no_collection)
        layers = {id(block): f"layers.{i}" for part in trainer.parts for i, block in part.blocks().items()}
        trainer.train_step()
        recorder = Recorder(layers, hardware != "cpu")
        _in_other_thread(trainer, [recorder])
        with recorder.on():
            trainer.train_step()
    state = [x for of in trainer.optimizer.adamw.state.values() for x in of.values() if isinstance(x, Tensor)]
    weights = sum(p.numel() * p.element_size() for p in trainer.optimizer.pieces.values())
    moments = sum(x.numel() * x.element_size() for x in state)
    return told(recorder.log, name_groups(trainer.meshes.lanes, trainer.fold, rank, 8)), weights, moments


def rehearsed(changes: dict[str, Any], world: int, rank: int, hardware: str) -> Rehearsal:
    return rehearse(config_of(changes, world, hardware), world, rank, hardware, steps=2)
