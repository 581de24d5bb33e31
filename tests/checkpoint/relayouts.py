"""Runs on ranks: a model's shards under one mapping moved to another, and what a checkpoint would have given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests import parity
from tests.support.live_bytes import LiveBytes
from titanmoe.checkpoint import relayout
from titanmoe.checkpoint.checkpoint_folder import Checkpoint, write_checkpoint
from titanmoe.checkpoint.relayout import WORD, Relayout
from titanmoe.checkpoint.state import Targets, persistent_buffers, shards_to_load, shards_to_save
from titanmoe.comm.collectives import Group, launch_all_to_all
from titanmoe.config.fields import to_tables
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.models.transformer import Transformer
from titanmoe.ops import counter_rng
from titanmoe.parallel.materialize import fill_normal

CPU = torch.device("cpu")
BATCH = {"training.global_batch_size": 16}
"""A batch size that the data ranks and pipelines of all mappings divide."""


def build(config: Config) -> list[Transformer]:
    """This rank's stages, ready to train."""
    from titanmoe.parallel import apply

    meshes = apply.make_meshes(derive(dist.get_world_size(), config.parallelism), config, CPU)
    return apply.build(config, meshes, 1, CPU)


def read(changes: dict[str, Any], size: int) -> Config:
    """The config of a training mapping, or with "generate" of a model to generate with."""
    from titanmoe.generate.model import config_to_run

    degrees = changes.get("generate")
    config = parity.read(BATCH | {name: value for name, value in changes.items() if name != "generate"}, size)
    if degrees is None:
        return config
    one = {"pp": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1}
    return config_to_run(config, size, one | degrees, "bfloat16", "cpu")


def shards(changes: dict[str, Any]) -> tuple[Config, Targets]:
    """The shards of a model built for the mapping."""
    from titanmoe.fold.meshes import build_meshes
    from titanmoe.generate.build_model import build_empty

    size = dist.get_world_size()
    config = read(changes, size)
    if "generate" in changes:
        return config, build_empty(config, build_meshes(derive(size, config.parallelism), "cpu", trains=False), CPU)[1]
    return config, targets_of(build(config), config)


def targets_of(stages: list[Transformer], config: Config) -> Targets:
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    buffers = {name: b for stage in stages for name, b in persistent_buffers(stage).items()}
    return shards_to_load(parameters, buffers, None, config.model.tie_embeddings)


@torch.no_grad()
def fill(targets: Targets, step: int) -> None:
    """Other numbers in every step, in no tensor those that it begins with."""
    for stored, shard in targets.values():
        fill_normal(shard.tensor, shard.offset, torch.Size(shard.shape), counter_rng.key(stored, step), 1.0)


def save(folder: str, source: Targets, config: Config) -> None:
    record = {"step": 1, "config": to_tables(config)}
    write_checkpoint(folder, shards_to_save(source), record, overwrite=True, group=dist.group.WORLD)


def differing(destination: Targets, wanted: dict[str, Tensor]) -> list[str]:
    return [
        f"{name} on rank {dist.get_rank()}"
        for name, (_, shard) in destination.items()
        if not torch.equal(as_bits(shard.tensor), as_bits(wanted[name]))
    ]


def as_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def needed_bytes(source: Targets, destination: Targets) -> int:
    """Return the bytes of the destination that this rank lacks, counted element by element, in the narrower dtype."""
    total = 0
    for name in {stored for stored, _ in destination.values()}:
        theirs = [shard for stored, shard in destination.values() if stored == name]
        ours = [shard for stored, shard in source.values() if stored == name]
        missing = torch.zeros(theirs[0].shape, dtype=torch.bool)
        for some, value in ((theirs, True), (ours, False)):
            for shard in some:
                missing[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.sizes, strict=True))] = value
        total += int(missing.sum()) * theirs[0].dtype.itemsize
    return total


@dataclass
class Moved:
    """Observations of a rank during a move, the second that a plan makes."""

    wrong: list[str]
    """Names of the tensors that differ from those that a checkpoint gives."""
    needed: int
    """Bytes that it had to get."""
    messages: list[tuple[int, int]]
    """Bytes that it sent and received in each round."""
    peak: int
    """Most bytes of memory that it took at once, beside both models."""


def move(folder: str, before: dict[str, Any], after: dict[str, Any], round_bytes: int) -> Moved:
    config, source = shards(before)
    _, destination = shards(after)
    leave_out = ("model.mtp.",) if "generate" in after else ()
    plan = Relayout(source, destination, leave_out=leave_out, round_bytes=round_bytes)
    messages: list[tuple[int, int]] = []

    def launch(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        assert not send[group.rank], "a rank sends nothing to itself"
        messages.append((WORD * sum(send), WORD * sum(receive)))
        return launch_all_to_all(x, send, receive, group)

    for step in (1, 2):
        fill(source, step)
        for _, shard in destination.values():
            shard.tensor.fill_(torch.nan)
        messages.clear()
        memory = LiveBytes(shard.tensor for _, shard in (*source.values(), *destination.values()))
        with memory, mock.patch.object(relayout, "launch_all_to_all", launch):
            plan.move(source, destination)
    moved = {name: shard.tensor.clone() for name, (_, shard) in destination.items()}
    save(folder, source, config)
    Checkpoint(Path(folder)).fill(destination)
    return Moved(differing(destination, moved), needed_bytes(source, destination), messages, memory.peak)


def refused(before: dict[str, Any], after: dict[str, Any], leave_out: tuple[str, ...] = ()) -> str:
    """Return the message of the error that planning a move raises on this rank; "" if it raises none."""
    (_, source), (_, destination) = shards(before), shards(after)
    try:
        Relayout(source, destination, leave_out=leave_out)
    except ConfigError as error:
        return str(error)
    return ""


def other_shards(before: dict[str, Any], after: dict[str, Any]) -> str:
    (_, source), (_, destination) = shards(before), shards(after)
    plan = Relayout(source, destination)
    try:
        plan.move(destination, source)
    except ValueError as error:
        return str(error)
    return ""


def losses(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, float, float]:
    """The loss of one batch under a mapping: with its first weights, after a move, and with a checkpoint's weights."""
    from titanmoe.parallel.data_parallel import free_gathered

    _, source = shards(before)
    fill(source, 1)
    training = parity.make_trainer(BATCH | after, loader=parity.samples()).training
    destination = shards_to_load(training.parameters, training.buffers, None, tied=False)

    def loss() -> float:
        batches, slicer, gradients = training.loader.peek(), training.slicer, training.gradients
        gradients.begin_step(slicer.count(batches))
        return float(gradients.engine.run(slicer.slices(batches), slicer.objective, backward=False))

    first = loss()
    Relayout(source, destination).move(source, destination)
    for stage in training.stages:
        free_gathered(stage)
    moved = loss()
    training = parity.make_trainer(BATCH | after, loader=parity.samples()).training
    fill(shards_to_load(training.parameters, training.buffers, None, tied=False), 1)
    return first, moved, loss()
