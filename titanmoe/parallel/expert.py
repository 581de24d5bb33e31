"""Give routing, dispatch and balance losses their process groups, and reserve the dispatchers' buffers.

The experts' weights are sharded by the parallel plan (titanmoe.parallel.parallel_plan).
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


def apply_expert_parallel(model: Transformer, meshes: Meshes) -> None:
    """Set the process groups of each MoE layer's dispatcher, balance loss and capacity, in place."""
    for moe in model.moe_layers().values():
        moe.dispatcher.place(expert_ranks(meshes))
        moe.balance.sequence, moe.balance.data = meshes.sequence, meshes.data
        if moe.capacity is not None:
            moe.capacity.sequence = meshes.sequence


def expert_ranks(meshes: Meshes) -> ExpertRanks:
    """Return the ranks that this rank exchanges routed tokens with."""
    return ExpertRanks(meshes.expert_group, meshes.fold.ep, meshes.fold.etp, meshes.within, meshes.across)


def reserve_buffers(
    model: Model,
    moe: MoEOptions,
    training: Training,
    meshes: Meshes,
    device: torch.device,
    reserve: Callable[..., Any] | None = None,
) -> SharedBuffers | None:
    """Return the buffers that a step attaches to its dispatchers; None if they need none. Collective over the world.

    Args:
        model: the recipe's [model].
        moe: the recipe's [moe].
        training: the recipe's [training].
        meshes: the run's.
        device: where the buffers are.
        reserve: called in place of the dispatcher's own `reserve`.
    """
    reserve = reserve or DISPATCHERS.implementation(moe.dispatcher).reserve
    fold = meshes.fold
    tokens = training.local_batch_size * training.seq_len // (fold.cp * fold.tp)
    dtype = getattr(torch, training.mixed_precision_param)
    return reserve(model, moe, expert_ranks(meshes), tokens, dtype, device)
