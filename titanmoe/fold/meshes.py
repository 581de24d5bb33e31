"""The fold as process groups and DeviceMeshes. `build_meshes` makes a group for each axis with communication.

The two views (titanmoe.fold.degrees) are two meshes over the same ranks of a pipeline stage: `Meshes.dense` for
attention, dense layers and vocabulary, with the axes (dp_replicate, fsdp, tp), and `Meshes.experts`, with
(edp_replicate, edp, ep, etp).

A group costs every rank threads and sockets, and on GPUs a communicator with its buffers. So axes over the same ranks
share one, but only within a kind: messages that may be in flight at the same time never use the same group.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Registers the backend of `Communicators.placeholder`; nothing else of torch does.
from torch.testing._internal.distributed import fake_pg as _fake_pg  # noqa: F401

from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.fold.degrees import Fold, nodes_of_a_group
from titanmoe.fold.rank_groups import View, coordinates, group_of, groups

CommunicatorKind = Literal["blocking", "dispatch", "shards", "replicas", "stages"]
"""The kind of a communicator, by what it is used for, and why messages of one kind may share it:

    blocking  what computation waits for before it sends the next: tp, cp, sums of counts, losses and norms; the default
              group too, and a vocabulary over all stages, whose messages all ranks start in one order
    dispatch  the dispatchers' all-to-alls, in flight while the device computes: not shared
    shards    FSDP's all-gathers and reduce-scatters, of either view: it sends all units from the same two streams
    replicas  HSDP's all-reduces, of either view: one stream, in the order of backward
    stages    the pipeline; on GPUs also "stages 1" and so on, over the same ranks, so that a rank only sends to one
              rank in each, or only receives from it (`titanmoe.parallel.pipeline_stage`)

Saving, which sends in no fixed order, has a group of its own, of no such kind (`titanmoe.checkpoint.saver`).
docs/launch.md counts the communicators of a large world.
"""

HIGH_PRIORITY: tuple[CommunicatorKind, ...] = ("dispatch", "shards")
"""The kinds whose NCCL streams have high priority: their messages are in flight while the device computes, and a
grouped matmul could occupy all multiprocessors before their kernels start."""

SILENT = "(nobody sends along this axis)"
"""Name of a group that was not made, which torch's error message contains if it is used."""


class Communicators:
    """The process groups of this rank, made on first use. All ranks must ask for the same groups in the same order."""

    def __init__(self, timeout: timedelta | None = None):
        self.timeout = timeout
        everyone = tuple(range(dist.get_world_size()))
        self.groups: dict[tuple[str, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {
            ("blocking", (everyone,)): dist.group.WORLD
        }

    def group(self, kind: CommunicatorKind | str, rank_lists: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """Return this rank's process group among equal groups, such as those along tp, made on the first request.

        Collective over the world. None if this rank is in none of the groups. If each group is a single rank, the
        result is `placeholder`.

        Args:
            kind: the kind of messages, such as "dispatch"; only requests of one kind share a process group.
            rank_lists: the ranks of each group; no rank is in two of them, and all have the same size.
        """
        key = kind, tuple(rank_lists)
        if len(key[1][0]) == 1:
            return self.placeholder
        if key not in self.groups:
            self.groups[key] = self._make(*key)
        return self.groups[key]

    def _make(self, kind: str, rank_lists: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        if dist.group.WORLD.bound_device_id is not None:  # NCCL: else each group would split the whole world
            options = _high_priority_options() if kind in HIGH_PRIORITY else None  # None: a copy of the world's
            ranks = [list(part) for part in rank_lists]
            return dist.split_group(split_ranks=ranks, timeout=self.timeout, pg_options=options, group_desc=kind)
        new_groups = [dist.new_group(list(part), self.timeout, group_desc=kind) for part in rank_lists]
        own_groups = [group for part, group in zip(rank_lists, new_groups, strict=True) if dist.get_rank() in part]
        return own_groups[0] if own_groups else None

    @cached_property
    def placeholder(self) -> dist.ProcessGroup:
        """A process group of this rank alone, for axes along which nothing is sent.

        It has no thread, socket or communicator, and making it needs no other rank. In a world of one rank it is the
        default group.
        """
        if dist.get_world_size() == 1:
            return dist.group.WORLD
        return dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True, group_desc="alone")


def _high_priority_options() -> Any:
    """Return a copy of the world's NCCL options, with streams of high priority.

    A copy, because splitting a group writes into its options.
    """
    world = dist.group.WORLD
    options = copy.deepcopy(world._get_backend(world.bound_device_id).options)
    options.is_high_priority_stream = True
    return options


@dataclass(frozen=True)
class Meshes:
    """The DeviceMeshes and process groups of this rank for one mapping."""

    fold: Fold
    communicators: Communicators
    dense: DeviceMesh
    """Attention's view of this rank's stage: (dp_replicate, fsdp, tp), fsdp being dp_shard x cp."""
    experts: DeviceMesh
    """The experts' view of the same ranks: (edp_replicate, edp, ep, etp)."""
    dense_data: DeviceMesh
    """Ranks that shard attention, dense layers and vocabulary: ([dp_replicate,] fsdp)."""
    expert_data: DeviceMesh
    """Ranks that shard experts: ([edp_replicate,] edp)."""
    pp: Group
    cp: Group
    tp: Group
    data: Group
    """dp_replicate x dp_shard: ranks with different samples."""
    sequence: Group
    """cp x tp: ranks that own tokens of the same samples."""
    expert_group: Group
    """ep x etp, etp innermost: ranks that send each other routed tokens."""
    world: Group
    within: Group
    """Ranks of `expert_group` on this rank's node; `expert_group` itself unless the dispatcher works node by node."""
    etp: Group
    """Ranks over which experts' adapters sum their gradients; NO_GROUP without adapters."""
    across: Group
    """Ranks of `expert_group` at this rank's position on each node; NO_GROUP if `within` is `expert_group`."""
    stages: Group
    """pp, for the collectives of a vocabulary that is sharded over pp and tp; NO_GROUP if none is."""
    vocabulary: Group
    """pp x tp: ranks that shard this vocabulary; NO_GROUP if none do."""
    vocabulary_mesh: DeviceMesh | None
    """(dp_replicate, fsdp, vocabulary) of all ranks, vocabulary being pp x tp; None if it is not sharded so."""

    @property
    def vocabulary_data(self) -> DeviceMesh:
        """The axes that shard what pp and tp leave of the vocabulary on a rank: ([dp_replicate,] fsdp).

        Only if the vocabulary is sharded over pp and tp.
        """
        mesh = self.vocabulary_mesh
        return mesh["fsdp"] if self.fold.dp_replicate == 1 else mesh["dp_replicate", "fsdp"]  # type: ignore[index]


def build_meshes(
    fold: Fold,
    device_type: str,
    node: int = -1,
    timeout: timedelta | None = None,
    trains: bool = True,
    etp: bool = False,
    vocabulary: bool = False,
) -> Meshes:
    """Create the process groups and DeviceMeshes of a mapping. Collective over the world, which has `fold.world` ranks.

    Args:
        device_type: "cpu" or "cuda".
        node: number of ranks of a node if the dispatcher works node by node, else -1.
        timeout: timeout of collectives in the new groups; None for torch's default.
        trains: False if nothing is trained and weights are not sharded over data ranks, so that FSDP sends nothing.
        etp: whether to make a group of the etp ranks, over which gradients of adapters are summed.
        vocabulary: whether embedding and head are sharded over pp and tp.
    """
    communicators = Communicators(timeout)

    def group_over(kind: CommunicatorKind, view: View, *axes: str) -> dist.ProcessGroup:
        return communicators.group(kind, groups(fold, view, axes))

    def mesh(
        view: View, ranks: torch.Tensor | None = None, **axes: tuple[CommunicatorKind | None, tuple[str, ...]]
    ) -> DeviceMesh:
        """Build a DeviceMesh, of the ranks of this rank's stage unless others are given.

        Args:
            view: "attention" or "experts".
            ranks: the ranks of the mesh, in its shape.
            axes: for each dimension of the mesh, the kind of its communicator (None: nothing is sent) and the axes of
                the view that it combines.
        """
        sizes = [len(group_of(fold, view, parts, 0)) for _, parts in axes.values()]
        stage = coordinates(fold, view, dist.get_rank())["pp"] * fold.stage
        ranks = torch.arange(stage, stage + fold.stage).view(sizes) if ranks is None else ranks
        kinds = [kind if trains or kind == "blocking" else None for kind, _ in axes.values()]
        device_mesh = DeviceMesh.from_group(
            [
                group_over(kind, view, *parts) if kind else communicators.placeholder
                for kind, (_, parts) in zip(kinds, axes.values(), strict=True)
            ],
            device_type,
            ranks,
            mesh_dim_names=tuple(axes),
        )
        # A placeholder has one rank, whatever the mesh says: with this name a collective along the axis raises instead
        # of returning what it was given.
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
            if size > 1 and kind is None:
                device_mesh._dim_group_names[i] = SILENT
        return device_mesh

    expert_group, within, across = _expert_groups(fold, communicators, node)
    dense = mesh(
        "attention",
        dp_replicate=("replicas", ("dp_replicate",)),
        fsdp=("shards", ("dp_shard", "cp")),
        tp=("blocking", ("tp",)),
    )
    experts = mesh(
        "experts",
        edp_replicate=("replicas", ("edp_replicate",)),
        edp=("shards", ("edp",)),
        ep=(None, ("ep",)),  # routed tokens are sent over ep and etp together
        etp=(None, ("etp",)),
    )
    vocabulary_mesh = None
    if vocabulary:
        world = torch.arange(fold.world).view(fold.pp, fold.dp_replicate, -1, fold.tp)
        vocabulary_mesh = mesh(
            "attention",
            world.permute(1, 2, 0, 3).flatten(2),
            dp_replicate=("replicas", ("dp_replicate",)),
            fsdp=("shards", ("dp_shard", "cp")),
            vocabulary=("blocking", ("pp", "tp")),
        )
    return Meshes(
        fold=fold,
        communicators=communicators,
        dense=dense,
        experts=experts,
        dense_data=dense["fsdp"] if fold.dp_replicate == 1 else dense["dp_replicate", "fsdp"],
        expert_data=experts["edp"] if fold.edp_replicate == 1 else experts["edp_replicate", "edp"],
        pp=Group.of(group_over("stages", "attention", "pp")),
        cp=Group.of(group_over("blocking", "attention", "cp")),
        tp=Group.of(group_over("blocking", "attention", "tp")),
        data=Group.of(group_over("blocking", "attention", "dp")),
        sequence=Group.of(group_over("blocking", "attention", "cp", "tp")),
        expert_group=expert_group,
        world=Group.of(dist.group.WORLD),
        etp=Group.of(group_over("blocking", "experts", "etp")) if etp else NO_GROUP,
        within=within,
        across=across,
        stages=Group.of(group_over("blocking", "attention", "pp")) if vocabulary else NO_GROUP,
        vocabulary=Group.of(vocabulary_mesh.get_group("vocabulary")) if vocabulary_mesh is not None else NO_GROUP,
        vocabulary_mesh=vocabulary_mesh,
    )


def _expert_groups(fold: Fold, communicators: Communicators, node: int) -> tuple[Group, Group, Group]:
    """Create the groups over which the dispatcher of this rank's experts sends. Collective over the world.

    Args:
        communicators: the process groups made so far.
        node: number of ranks of a node if the dispatcher works node by node, else -1.

    Returns:
        The dispatch group (ep x etp); its ranks on this node; and its ranks at this rank's position on each node. If
        `node` is given and the group spans nodes, nothing is sent on the first, and it has no process group; else the
        second is the first, and the third is NO_GROUP.
    """
    axes, rank = ("ep", "etp"), dist.get_rank()
    if node == -1 or nodes_of_a_group(fold.world, fold.ep, fold.etp, node) == 1:
        full = Group.of(communicators.group("dispatch", groups(fold, "experts", axes)))
        return full, full, NO_GROUP
    members = group_of(fold, "experts", axes, rank)
    size = len(members)
    within = [range(first, first + node) for first in range(0, fold.world, node)]
    across = [range(first + i, first + size, node) for first in range(0, fold.world, size) for i in range(node)]
    inside, between = (Group.of(communicators.group("dispatch", map(tuple, parts))) for parts in (within, across))
    return Group(SILENT, size, members.index(rank)), inside, between
