"""Expert parallel: experts split over the expert view's ep (whole experts) and etp (slices of the hidden width)."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard

from titanmoe.config.schema import Config
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatch import SharedBuffers, dispatcher_class
from titanmoe.parallel.tensor import put_on_mesh

# The dim that is split over etp: the hidden one; of w2_bias the model dim, because otherwise every etp rank adds it.
ETP_DIM = {"w1": 1, "w3": 1, "w2": 2, "w1_bias": 1, "w3_bias": 1, "w2_bias": 1}


def expert_parallel(model: Transformer, meshes: Meshes) -> None:
    for moe in model.moe_layers().values():
        moe.dispatcher.set_groups(meshes.dispatch, meshes.fold.ep, meshes.fold.etp)
        moe.dispatcher.set_nodes(meshes.within, meshes.across)
        moe.balance.sequence, moe.balance.data = meshes.sequence, meshes.data
        if moe.capacity is not None:
            moe.capacity.sequence = meshes.sequence
        if meshes.dispatch.size > 1:
            moe.experts.set_etp_rank(meshes.dispatch.rank % meshes.fold.etp)
            for name, _ in list(moe.experts.named_parameters()):
                put_on_mesh(moe.experts, name, meshes.experts["ep", "etp"], [Shard(0), Shard(ETP_DIM[name])])


def reserve_buffers(config: Config, meshes: Meshes, device: torch.device) -> SharedBuffers | None:
    """What a step attaches to its dispatchers; None if they need nothing. Collective over the world."""
    return dispatcher_class(config.moe.dispatcher).reserve(config, meshes.fold, meshes.dispatch, device)
