"""What routing, dispatch and balance need to know of expert parallelism: their groups, and the buffers of dispatchers.

The experts themselves are divided by the plan (titanmoe.parallel.tensor).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from titanmoe.config.schema import Model, Training
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks, SharedBuffers
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS


def expert_parallel(model: Transformer, meshes: Meshes) -> None:
    """Tell each MoE layer its groups."""
    for moe in model.moe_layers().values():
        moe.dispatcher.place(expert_ranks(meshes))
        moe.balance.sequence, moe.balance.data = meshes.sequence, meshes.data
        if moe.capacity is not None:
            moe.capacity.sequence = meshes.sequence


def expert_ranks(meshes: Meshes) -> ExpertRanks:
    return ExpertRanks(meshes.expert_group, meshes.fold.ep, meshes.fold.etp, meshes.within, meshes.across)


def reserve_buffers(
    model: Model,
    moe: MoEOptions,
    training: Training,
    meshes: Meshes,
    device: torch.device,
    reserve: Callable[..., Any] | None = None,
) -> SharedBuffers | None:
    """The buffers that a step attaches to its dispatchers; None if they need none. Collective over the world.

    reserve: called in place of the dispatcher's own `reserve`.
    """
    reserve = reserve or DISPATCHERS.implementation(moe.dispatcher).reserve
    fold = meshes.fold
    tokens = training.local_batch_size * training.seq_len // (fold.cp * fold.tp)
    dtype = getattr(torch, training.mixed_precision_param)
    return reserve(model, moe, expert_ranks(meshes), tokens, dtype, device)
