"""Expert parallel: experts lie on ep (whole experts) and etp (slices of their hidden width) of the expert view."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import Shard

from titanmoe.config.dispatchers import DISPATCHERS
from titanmoe.config.schema import Config
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.capacity import Capacity
from titanmoe.moe.chunks import Choice, choose, dummy_experts, measure
from titanmoe.moe.dispatch import Dispatcher, dispatcher_class
from titanmoe.moe.symmetric import Memory
from titanmoe.parallel.tensor import place

# The dim that lies on etp: hidden, but the model dim of the last, (E, D), which every etp rank would add otherwise.
CUT = {"w1": 1, "w3": 1, "w2": 2, "w1_bias": 1, "w3_bias": 1, "w2_bias": 1}


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
                place(moe.experts, name, meshes.experts["ep", "etp"], [Shard(0), Shard(CUT[name])])


def symmetric(config: Config, meshes: Meshes, device: torch.device) -> Memory | None:
    """What a step lends to the layers' dispatchers, if they take anything. By all ranks together."""
    return dispatcher_class(config.moe.dispatcher).reserve(config, meshes.fold, meshes.dispatch, device)


def routed_rows(config: Config, meshes: Meshes) -> int:
    """Of one layer and microbatch on a rank: under even routing, or of bins that are padded."""
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
    """Where moe.overlap_chunks = -1: measured by all ranks together, chosen alike on all, and set. None elsewhere, and
    where no row leaves its rank in chunks.
    """
    wire = meshes.within if DISPATCHERS[config.moe.dispatcher].nodes else meshes.dispatch
    if config.moe.overlap_chunks != -1 or wire.size == 1:
        return None
    again = config.activation_checkpoint
    forwards = 1 + (1 / again.every if again.mode in ("full", "moe") else 0)
    compute = getattr(torch, config.training.mixed_precision_param)
    experts = dummy_experts(config.model, config.moe, meshes.fold.ep, meshes.fold.etp, compute, device)
    rows = routed_rows(config, meshes)
    choice = choose(measure(experts, rows, wire, meshes.world), rows, forwards)
    for dispatcher in dispatchers:
        dispatcher.set_chunks(choice.chunks)
    return choice
