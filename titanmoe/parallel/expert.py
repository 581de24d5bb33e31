"""Expert parallel: experts split over the expert view's ep (whole experts) and etp (slices of the hidden width)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import Shard

from titanmoe.config.dispatchers import DISPATCHERS
from titanmoe.config.schema import Config
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.capacity import Capacity
from titanmoe.moe.chunks import Choice, choose_chunks, dummy_experts, measure
from titanmoe.moe.dispatch import Dispatcher, SharedBuffers, dispatcher_class
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
    """What a step lends to its dispatchers; None if they need nothing. Collective over the world."""
    return dispatcher_class(config.moe.dispatcher).reserve(config, meshes.fold, meshes.dispatch, device)


def routed_rows(config: Config, meshes: Meshes) -> int:
    """Rows of one layer and microbatch on a rank, under even routing or with padded bins."""
    model, options, samples = config.model, config.moe, config.training.local_batch_size
    owned = samples * config.training.seq_len // (meshes.cp.size * meshes.tp.size)
    if not options.pad_to_capacity:
        return owned * model.top_k * meshes.fold.etp
    capacity = Capacity(model, options)
    capacity.sequence = meshes.sequence
    return capacity.bin(samples, owned) * model.num_experts * meshes.fold.etp


def measured_chunks(
    config: Config, meshes: Meshes, dispatchers: Iterable[Dispatcher], device: torch.device
) -> Choice | None:
    """For moe.overlap_chunks = -1: measure on all ranks together, make the same choice on all, and set it. None for
    other values, and if no row leaves its rank in chunks.
    """
    wire = meshes.within if DISPATCHERS[config.moe.dispatcher].nodes else meshes.dispatch
    if config.moe.overlap_chunks != -1 or wire.size == 1:
        return None
    recomputed = config.activation_checkpoint
    forwards = 1 + (1 / recomputed.every if recomputed.mode in ("full", "moe") else 0)
    compute = getattr(torch, config.training.mixed_precision_param)
    experts = dummy_experts(config.model, config.moe, meshes.fold.ep, meshes.fold.etp, compute, device)
    rows = routed_rows(config, meshes)
    choice = choose_chunks(measure(experts, rows, wire, meshes.world), rows, forwards)
    for dispatcher in dispatchers:
        dispatcher.set_chunks(choice.chunks)
    return choice
