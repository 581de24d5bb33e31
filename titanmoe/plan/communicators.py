"""Memory that NCCL takes of a device: buffers of each communicator, and more for each rank that is sent to directly.

docs/launch.md lists the communicators; tests/rehearse/test_communicators.py counts those that a run makes.
"""

from __future__ import annotations

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.pipeline_schedules import channels, stage_ranks
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.plan.devices import Device
from titanmoe.plan.links import LinkGroup


def communicators(config: Config, fold: Fold, domain: int) -> set[tuple[str, LinkGroup]]:
    """Return (kind, ranks) of each NCCL communicator that a rank creates. Axes of a kind over the same ranks share one.

    Kinds are "blocking", "shards", "replicas", "dispatch", and with a pipeline "stages", "stages 1" and so on. Groups
    of one rank are left out. `domain` is the number of devices that share the fast link.
    """
    sequence, inner = fold.tp * fold.cp, fold.ep * fold.etp
    kinds_and_groups = {
        ("blocking", LinkGroup(fold.world, 1)),
        ("blocking", LinkGroup(fold.tp, 1)),
        ("blocking", LinkGroup(fold.cp, fold.tp)),
        ("blocking", LinkGroup(sequence, 1)),
        ("blocking", LinkGroup(fold.dp, sequence)),
        ("shards", LinkGroup(fold.dp_shard * fold.cp, fold.tp)),
        ("shards", LinkGroup(fold.edp, inner)),
        ("replicas", LinkGroup(fold.dp_replicate, fold.stage // fold.dp_replicate)),
        ("replicas", LinkGroup(fold.edp_replicate, fold.stage // fold.edp_replicate)),
    }
    if fold.pp > 1:
        several = max(channels(stage_ranks(config.pipeline, fold.pp)).values())
        kinds_and_groups |= {
            (f"stages {n}" if n else "stages", LinkGroup(fold.pp, fold.stage)) for n in range(several + 1)
        }
    if DISPATCHERS.look_up(config.moe.dispatcher).works_by_node and inner > domain:
        kinds_and_groups |= {("dispatch", LinkGroup(domain, 1)), ("dispatch", LinkGroup(inner // domain, domain))}
    else:
        kinds_and_groups.add(("dispatch", LinkGroup(inner, 1)))
    if config.lora.rank:  # gradients of what every etp rank has whole
        kinds_and_groups.add(("blocking", LinkGroup(fold.etp, 1)))
    if config.parallelism.vocab == "pipeline":
        kinds_and_groups.add(("blocking", LinkGroup(fold.pp, fold.stage)))
        if fold.pp * fold.tp < fold.world and fold.tp > 1:
            kinds_and_groups.add(("blocking", LinkGroup(fold.pp * fold.tp, fold.stage)))
    elif config.model.tie_embeddings and fold.pp > 1:
        kinds_and_groups.add(("blocking", LinkGroup(2, fold.world - fold.stage)))
    return {(kind, group) for kind, group in kinds_and_groups if group.size > 1}


def nccl_bytes(config: Config, fold: Fold, device: Device) -> float:
    """Return the bytes of a device's memory that NCCL takes for communicators and for peers in direct messages.

    Routed tokens and ulysses go to every rank of a group, ring and pipeline to two. The pipeline's communicators count
    as one: they reach the same two ranks, and a communicator takes its own memory at its first collective
    (NCCL_RUNTIME_CONNECT, from NCCL 2.22 on), which these never have.
    """
    kinds_and_groups = {
        (kind, group) for kind, group in communicators(config, fold, device.domain) if "stages " not in kind
    }
    peers = 0
    for kind, group in kinds_and_groups:
        ring = kind == "blocking" and fold.cp > 1 and group == LinkGroup(fold.cp, fold.tp)
        near = group.ranks_per_domain(device.domain) - 1
        if kind == "dispatch" or (ring and config.parallelism.cp_kind == "ulysses"):
            peers += near
        elif kind == "stages" or (ring and config.parallelism.cp_kind == "ring"):
            peers += min(2, near)
    return device.communicator * len(kinds_and_groups) + device.peer * peers


def usable_bytes(config: Config, fold: Fold, device: Device) -> float:
    """Return the bytes of the device's memory that CUDA and NCCL leave for tensors."""
    return device.memory - device.reserved - nccl_bytes(config, fold, device)
