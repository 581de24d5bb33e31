"""Tensor and sequence parallel: parameters are split over tp as the `tp_dims` of their module say.

Column-wise then row-wise, as usual: heads, hidden width and vocabulary are split, and between them the sequence is. The
modules gather and scatter in their own forward (`gather(x, 1, self.tp)`); here they get their group. All other
parameters are replicated over tp and only see this rank's tokens or heads; `sum_replicated` sums their gradients.
Routers are replicated over the data axes too (`titanmoe.parallel.sharded`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.models.lora_spec import with_adapters
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.norm import local_grad


def put_on_mesh(module: nn.Module, name: str, mesh: DeviceMesh, placements: list) -> None:
    """Turns the (meta) parameter `name` of a module into a DTensor of that mesh, without communication."""
    *path, last = name.split(".")
    owner = module.get_submodule(".".join(path))
    parameter = getattr(owner, last)
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    on_mesh = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    setattr(owner, last, nn.Parameter(on_mesh, requires_grad=parameter.requires_grad))


def tensor_parallel(model: Transformer, mesh: DeviceMesh, tp: Group) -> None:
    if tp.size == 1:
        return
    shard = {}
    for path, module in model.named_modules():
        if hasattr(module, "tp_dims"):
            module.tp = tp
            shard |= {f"{path}.{name}": dim for name, dim in with_adapters(module.tp_dims).items()}
    for name, _ in list(model.named_parameters()):
        if ".experts." not in name and ".router." not in name:
            put_on_mesh(model, name, mesh, [Shard(shard[name]) if name in shard else Replicate()])
    model.tie()


@torch.no_grad()
def sum_replicated(parameters: Iterable[nn.Parameter], stage: tuple[Group, ...], tp: Group, etp: Group) -> None:
    """Sums the gradients that FSDP does not, once per step, in one message per group and dtype: those of routers over
    the whole stage, those of other parameters that tp replicates (such as norms) over tp, those of experts' parameters
    that etp replicates over etp.

    stage: groups to sum over in turn, which together cover the stage, so that it needs no group of its own.
    """
    grads_by_group: dict[tuple[tuple[Group, ...], torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        placement_of = dict(zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True))
        replicated_axes = {axis for axis, placement in placement_of.items() if isinstance(placement, Replicate)}
        groups = stage if "fsdp" in replicated_axes else (tp,) if "tp" in replicated_axes else (etp,)
        if replicated_axes & {"fsdp", "tp", "etp"}:
            grad = local_grad(parameter)
            grads_by_group.setdefault((groups, grad.dtype), []).append(grad)
    for (groups, _), grads in grads_by_group.items():
        groups = [group for group in groups if group.size > 1]
        if not groups:
            continue
        total = torch.cat([grad.flatten() for grad in grads])
        for group in groups:
            total = all_reduce(total, group)
        for grad, piece in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(piece.view_as(grad))
