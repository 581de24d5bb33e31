"""Runs on ranks: a model exported live, and checkpoints of it to convert."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests import parity
from tests.checkpoint import relayouts
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.hf.live_export import LiveExport
from titanmoe.checkpoint.state import Targets, shards_to_save
from titanmoe.checkpoint.weight_digest import frozen_digest
from titanmoe.config.fields import to_tables
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Config, LoRA
from titanmoe.models.lora_spec import is_adapter

OTHERS = {name: value for name, value in parity.TINY.items() if not name.startswith("model.")}


def shards(changes: dict[str, Any]) -> tuple[Config, list[Any], Targets]:
    """A family's debug size, with numbers that it does not begin with."""
    config = parity._read(tuple(parity.arguments(OTHERS | relayouts.BATCH | changes)), dist.get_world_size())
    stages = relayouts.build(config)
    targets = relayouts.targets_of(stages, config)
    relayouts.fill(targets, 1)
    return config, stages, targets


def without_bias(targets: Targets) -> None:
    for stored, shard in targets.values():
        if stored.endswith("expert_bias"):
            shard.tensor.zero_()


def export(folder: str, changes: dict[str, Any], has_bias: bool, **options: Any) -> list[tuple[str, Tensor | None]]:
    """Save a checkpoint, and export it live after an export of other weights."""
    config, _, targets = shards(changes)
    if not has_bias:
        without_bias(targets)
    relayouts.save(folder, targets, config)
    plan = LiveExport(targets, config.model, **options)
    for block in plan.blocks:
        gathered = sum(math.prod(sizes) * dtype.itemsize for (_, (_, sizes)), dtype in block.regions.items())
        assert gathered <= plan.block_bytes or len(block.names) == 1
    saved = [shard.tensor.clone() for _, shard in targets.values()]
    for stored, shard in targets.values():
        shard.tensor.fill_(0 if stored.endswith("expert_bias") else 7)
    assert all((x == 7).all() for _, x in plan.tensors(targets) if x is not None and x.any())
    for (_, shard), tensor in zip(targets.values(), saved, strict=True):
        shard.tensor.copy_(tensor)
    return [(name, None if x is None else x.clone()) for name, x in plan.tensors(targets)]


def merge(folder: str, changes: dict[str, Any], **options: Any) -> list[tuple[str, Tensor | None]]:
    """Save the base weights and the adapters apart, and export both merged."""
    config, stages, targets = shards(changes)
    without_bias(targets)
    base = {name: target for name, target in targets.items() if not is_adapter(name)}
    adapters = {name: target for name, target in targets.items() if is_adapter(name)}
    plain = dataclasses.replace(config, lora=LoRA())
    relayouts.save(f"{folder}/base", base, plain)
    frozen = {name: p for stage in stages for name, p in stage.named_parameters() if not is_adapter(name)}
    record = {"step": 1, "config": to_tables(config), "base": frozen_digest(frozen, dist.group.WORLD)}
    write_checkpoint(f"{folder}/adapters", shards_to_save(adapters), record, group=dist.group.WORLD)
    return list(LiveExport(targets, config.model, merge=config.lora, **options).tensors(targets))


def refused(changes: dict[str, Any]) -> str:
    """Return the message of the error that an export raises; "" if it raises none."""
    config, _, targets = shards(changes)
    try:
        list(LiveExport(targets, config.model).tensors(targets))
    except ConfigError as error:
        return str(error)
    return ""
