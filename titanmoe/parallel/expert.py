"""Expert parallel: experts lie on ep (whole experts) and etp (slices of their hidden width) of the expert view."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard

from titanmoe.config.schema import Config
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatch import Hierarchical
from titanmoe.moe.symmetric import Symmetric
from titanmoe.parallel.tensor import place

# The dim that lies on etp: hidden, but the model dim of the last, (E, D), which every etp rank would add otherwise.
CUT = {"w1": 1, "w3": 1, "w2": 2, "w1_bias": 1, "w3_bias": 1, "w2_bias": 1}


def expert_parallel(model: Transformer, meshes: Meshes) -> None:
    for moe in model.moe_layers().values():
        moe.dispatcher.lay(meshes.dispatch, meshes.fold.ep, meshes.fold.etp)
        if isinstance(moe.dispatcher, Hierarchical):
            moe.dispatcher.lay_nodes(meshes.within, meshes.across)
        moe.balance.sequence, moe.balance.data = meshes.sequence, meshes.data
        if moe.capacity is not None:
            moe.capacity.sequence = meshes.sequence
        if meshes.dispatch.size > 1:
            moe.experts.lay(meshes.dispatch.rank % meshes.fold.etp)
            for name, _ in list(moe.experts.named_parameters()):
                place(moe.experts, name, meshes.experts["ep", "etp"], [Shard(0), Shard(CUT[name])])


def symmetric(config: Config, meshes: Meshes, device: torch.device) -> Symmetric | None:
    """What dispatches while a step runs, where the config asks for symmetric memory. By all ranks together."""
    asked = config.moe.dispatcher == "symm_mem"
    return Symmetric(config, meshes.fold, meshes.dispatch, device) if asked else None
