"""One gradient norm over both views."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanmoe.comm.collectives import Group, all_reduce


def replicas(parameter: nn.Parameter) -> int:
    """How many ranks of the stage have the same shard. A parameter's mesh covers the whole stage in either view."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Replicate))


def local_grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def local_norms(grads: list[Tensor]) -> list[Tensor]:
    """Return the norm of each in float64."""
    return torch._foreach_norm(grads, 2, dtype=torch.float64)


@torch.no_grad()
def grad_norm(
    parameters: dict[str, nn.Parameter],
    world: Group,
    copies: tuple[str, ...] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Each rank sums the squares of its shards, divided by the number of ranks with the same shard; then one sum over
    the world.

    parameters: those that are trained; a stage may have none. copies: names of parameters that are the same matrix on
    different stages.
    """
    if not parameters:
        return all_reduce(torch.zeros((), dtype=torch.float64, device=device), world).sqrt()
    norms = local_norms([local_grad(p) for p in parameters.values()])
    share = [1 / (replicas(p) * (len(copies) if name in copies else 1)) for name, p in parameters.items()]
    # Python numbers, not a tensor: copying one to a GPU would make the host wait.
    squares = torch._foreach_mul(torch._foreach_mul(norms, norms), share)
    return all_reduce(torch.stack(squares).sum(), world).sqrt()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> Tensor:
    """Returns the norm that all gradients then have."""
    grads = [local_grad(p) for p in parameters]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if grads:
        # On GPUs this is one kernel only if both have the same dtype.
        torch._foreach_mul_(grads, scale.to(torch.promote_types(grads[0].dtype, torch.float32)))
    return norm * scale
