"""The fold as DeviceMeshes: one world mesh, unflattened twice.

The attention view and the expert view are sub-meshes of the same root, so FSDP2 can combine either view's data axes
with its tensor or expert axes, and a parameter of either view is an ordinary DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanmoe.comm import ALONE, Group
from titanmoe.fold.degrees import Fold


@dataclass(frozen=True)
class Meshes:
    fold: Fold
    base: DeviceMesh  # (pp, stage)
    dense: DeviceMesh  # (dp_replicate, dp_shard, cp, tp) of this rank's stage
    experts: DeviceMesh  # (edp_replicate, edp, ep, etp) of the same ranks
    dense_data: DeviceMesh  # where attention, dense layers and vocabulary are sharded: ([dp_replicate,] dp_shard x cp)
    expert_data: DeviceMesh  # where experts are sharded: ([edp_replicate,] edp)
    pp: Group
    cp: Group
    tp: Group
    data: Group  # dp_replicate x dp_shard: ranks with different samples
    sequence: Group  # cp x tp: ranks that own tokens of the same samples
    stage: Group  # all ranks of the pipeline stage; their tokens are disjoint
    dispatch: Group  # ep x etp, etp innermost: ranks among which routed rows travel
    world: Group
    within: Group  # of dispatch, those on this rank's node
    across: Group  # of dispatch, those with this rank's place on the group's other nodes


def build_meshes(fold: Fold, device_type: str, node: int = -1) -> Meshes:
    """Collective over the world. A fresh root each time, because the names of flattened axes live on the root.

    node: how many ranks a node has, where dispatch is to be cut at nodes; else -1.
    """
    world = init_device_mesh(device_type, (fold.world,), mesh_dim_names=("world",))
    # Sub-meshes are addressed by integer dims: torch 2.11 does not take names here.
    base = world._unflatten(0, (fold.pp, fold.stage), ("pp", "stage"))
    dense = base._unflatten(
        1, (fold.dp_replicate, fold.dp_shard, fold.cp, fold.tp), ("dp_replicate", "dp_shard", "cp", "tp")
    )
    experts = base._unflatten(
        1, (fold.edp_replicate, fold.edp, fold.ep, fold.etp), ("edp_replicate", "edp", "ep", "etp")
    )
    dispatch, across = Group.of(experts["ep", "etp"]._flatten("dispatch")), ALONE
    within, nodes = dispatch, 1 if node == -1 else fold.nodes(node)
    if nodes > 1:
        cut = base._unflatten(1, (fold.stage // dispatch.size, nodes, node), ("groups", "across", "within"))
        within, across = Group.of(cut["within"]), Group.of(cut["across"])
    fsdp = dense["dp_shard", "cp"]._flatten("fsdp")
    return Meshes(
        fold=fold,
        base=base,
        dense=dense,
        experts=experts,
        dense_data=fsdp if fold.dp_replicate == 1 else DeviceMesh._concatenate([dense["dp_replicate"], fsdp]),
        expert_data=experts["edp"] if fold.edp_replicate == 1 else experts["edp_replicate", "edp"],
        pp=Group.of(base["pp"]),
        cp=Group.of(dense["cp"]),
        tp=Group.of(dense["tp"]),
        data=Group.of(dense["dp_replicate", "dp_shard"]._flatten("data")),
        sequence=Group.of(dense["cp", "tp"]._flatten("sequence")),
        stage=Group.of(base["stage"]),
        dispatch=dispatch,
        world=Group.of(world),
        within=within,
        across=across,
    )
