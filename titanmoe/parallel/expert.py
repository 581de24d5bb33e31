"""Expert parallelism: ep splits the experts of a layer, etp the hidden width of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from titanmoe.config.schema import Model, Training
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.fold.meshes import Meshes
from titanmoe.models.lora_spec import with_adapters
from titanmoe.models.tensors import EXPERT_SPLITS
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks, SharedBuffers
from titanmoe.moe.dispatchers.dispatcher_rules import DISPATCHERS
from titanmoe.parallel.tensor import put_on_mesh

# The dim that etp splits: the hidden one, but of w2_bias the model dim, because otherwise every etp rank would add it.
ETP_DIM = with_adapters(EXPERT_SPLITS) | {"w1_bias": 1, "w3_bias": 1, "w2_bias": 1}


def expert_parallel(model: Transformer, meshes: Meshes) -> None:
    for moe in model.moe_layers().values():
        moe.dispatcher.place(expert_ranks(meshes))
        moe.balance.sequence, moe.balance.data = meshes.sequence, meshes.data
        if moe.capacity is not None:
            moe.capacity.sequence = meshes.sequence
        if meshes.expert_group.size > 1:
            moe.experts.set_etp_rank(meshes.expert_group.rank % meshes.fold.etp)
            for name, _ in list(moe.experts.named_parameters()):
                over_etp = Shard(ETP_DIM[name]) if name in ETP_DIM else Replicate()
                put_on_mesh(moe.experts, name, meshes.experts["ep", "etp"], [Shard(0), over_etp])


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
