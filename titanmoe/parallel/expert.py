"""Give routing, dispatch and balance losses their process groups, and reserve the dispatchers' buffers.

The experts' weights are sharded by the parallel plan (titanmoe.parallel.parallel_plan).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from titanmoe.comm.collectives import first_text
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.files import format_bytes
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.dispatcher import CannotReserve, ExpertRanks, SharedBuffers
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS, why_not_symm_mem, with_dispatcher
from titanmoe.ops.device import kind


def apply_expert_parallel(model: Transformer, meshes: Meshes) -> None:
    """Set the process groups of each MoE layer's dispatcher, balance loss and capacity, in place. No communication."""
    for moe in model.moe_layers().values():
        moe.dispatcher.place(expert_ranks(meshes))
        moe.balance.sequence, moe.balance.data = meshes.sequence, meshes.data
        if moe.capacity is not None:
            moe.capacity.sequence = meshes.sequence


def expert_ranks(meshes: Meshes) -> ExpertRanks:
    """Return the dispatch group of ep x etp, with both degrees, and its groups within and across nodes, if any."""
    return ExpertRanks(meshes.expert_group, meshes.fold.ep, meshes.fold.etp, meshes.within, meshes.across)


def reserve_buffers(
    config: Config, meshes: Meshes, device: torch.device, reserve: Callable[..., SharedBuffers | None] | None = None
) -> SharedBuffers | None:
    """Allocate the buffers in which dispatchers exchange routed tokens, for a step to attach to all its MoE layers.

    None if the dispatcher needs none. Collective over the world.

    Args:
        reserve: called in place of the `reserve` of the dispatcher's class, with its arguments (`Dispatcher.reserve`).

    Raises:
        CannotReserve: on all ranks, if one of them cannot use the dispatcher.
    """
    reserve = reserve or DISPATCHERS.implementation(config.moe.dispatcher).reserve
    training, fold = config.training, meshes.fold
    tokens = training.local_batch_size * training.seq_len // (fold.cp * fold.tp)
    dtype = getattr(torch, training.mixed_precision_param)
    return reserve(config.model, config.moe, expert_ranks(meshes), tokens, dtype, device)


def choose_dispatcher(
    config: Config, meshes: Meshes, device: torch.device, node: int, reserve: Callable[..., SharedBuffers | None]
) -> tuple[Config, SharedBuffers | None, str]:
    """Choose the dispatcher where moe.dispatcher is "auto", and allocate its buffers. Collective over the world.

    It is "symm_mem" if every rank can use that and the mapping suits it (`why_not_symm_mem`), else "alltoall". A
    dispatcher that the recipe names is never replaced.

    Args:
        node: the number of ranks on this machine.
        reserve: `reserve_buffers`, or a function that replaces it, given (config, meshes, device).

    Returns:
        The config with the chosen dispatcher, its buffers or None, and a text that says what was chosen and why, "" if
        the recipe names the dispatcher.

    Raises:
        ConfigError: on all ranks, if one of them cannot use the dispatcher that the recipe names.
    """
    automatic, why_not = config.moe.dispatcher == "auto", ""
    if automatic:
        symmetric = DISPATCHERS.implementation("symm_mem")
        reason = why_not_symm_mem(config, meshes.fold, node, kind(device) == "cuda")
        why_not = first_text(reason or symmetric.missing(config.training.device))
        config = with_dispatcher(config, "alltoall" if why_not else "symm_mem")
    try:
        buffers = reserve(config, meshes, device)
    except CannotReserve as error:
        if not automatic:
            text = f'moe.dispatcher = "{config.moe.dispatcher}": {error}; use dispatcher = "alltoall"'
            raise ConfigError(text) from error
        config, buffers, why_not = with_dispatcher(config, "alltoall"), None, str(error)
    if not automatic:
        return config, buffers, ""
    if why_not:
        return config, buffers, f'alltoall, because moe.dispatcher = "auto" and {why_not}'
    fits = f"the ranks share memory: {format_bytes(buffers.size)} of buffers each"
    return config, buffers, f'symm_mem, because moe.dispatcher = "auto" and {fits}'
