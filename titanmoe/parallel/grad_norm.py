"""Compute and clip the norm of all gradients, over both views and all pipeline stages.

Every parameter is counted once: each rank adds the squares of its shards, divided by the number of ranks that have the
same shard, and the sum is reduced over the world.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanmoe.comm.collectives import Group, all_reduce


def replicas(parameter: nn.Parameter) -> int:
    """Return the number of ranks of the pipeline stage, this rank included, that have the same shard of a parameter.

    Every parameter is on a mesh of all ranks of the stage, or of all stages if these share the vocabulary: by FSDP, by
    the plan's "stage", or by `replicate_experts`, the experts that FSDP does not shard. A plain tensor counts as this
    rank's alone.
    """
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Replicate))


def local_grad(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of a parameter's gradient, a plain tensor that shares its memory; None if none."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def local_norms(grads: list[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, a scalar in float64."""
    return torch._foreach_norm(grads, 2, dtype=torch.float64)


@torch.no_grad()
def grad_norm(
    parameters: dict[str, nn.Parameter], world: Group, copies: tuple[str, ...] = (), device: torch.device | None = None
) -> Tensor:
    """Return the L2 norm of all gradients, a float64 scalar, on every rank. Collective over the world.

    Each parameter counts once, however many ranks have a replica of a shard of it.

    Args:
        parameters: this rank's trained parameters, by name, all with a gradient; a stage may have none.
        copies: names of the parameters that are copies of one matrix, such as a tied embedding on the first and last
            stage; together they count once.
        device: the device of the result on a rank without trained parameters.
    """
    if not parameters:
        return all_reduce(torch.zeros((), dtype=torch.float64, device=device), world).sqrt()
    norms = local_norms([local_grad(p) for p in parameters.values()])
    fractions = [1 / (replicas(p) * (len(copies) if name in copies else 1)) for name, p in parameters.items()]
    # Python numbers, not a tensor: copying one to a GPU would make the host wait.
    squares = torch._foreach_mul(torch._foreach_mul(norms, norms), fractions)
    return all_reduce(torch.stack(squares).sum(), world).sqrt()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> Tensor:
    """Scale this rank's gradients in place so that the norm of all gradients is at most max_norm. Return the new norm.

    No communication.

    Args:
        parameters: this rank's trained parameters, all with a gradient.
        norm: the norm of all gradients of all ranks, as `grad_norm` returns it.
    """
    grads = [local_grad(p) for p in parameters]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if grads:
        # On GPUs this is one kernel only if both have the same dtype.
        torch._foreach_mul_(grads, scale.to(torch.promote_types(grads[0].dtype, torch.float32)))
    return norm * scale
