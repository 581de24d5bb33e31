"""Expert parallel: experts lie on ep (whole experts) and etp (slices of their hidden width) of the expert view."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.tensor import place

HIDDEN = {"w1": 1, "w3": 1, "w2": 2}  # the hidden dim of (E, F, D), (E, F, D), (E, D, F)


def expert_parallel(model: Transformer, meshes: Meshes) -> None:
    for moe in model.moe_layers().values():
        moe.dispatcher.lay(meshes.dispatch, meshes.fold.ep, meshes.fold.etp)
        moe.balance.sequence, moe.balance.data = meshes.sequence, meshes.data
        if moe.capacity is not None:
            moe.capacity.sequence = meshes.sequence
        if meshes.dispatch.size > 1:
            for name, hidden in HIDDEN.items():
                place(moe.experts, name, meshes.experts["ep", "etp"], [Shard(0), Shard(hidden)])
