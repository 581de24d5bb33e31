"""Collectives of the forward and backward pass: differentiable, over a named group, nothing at all on a group of one.

Every one waits for its result before it returns: a collective still in flight that enters a compiled region gives
silently wrong gradients in torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks that share one axis, or several, with this rank; plain values, so that compiled code can hold it."""

    name: str
    size: int
    rank: int

    @staticmethod
    def of(mesh: DeviceMesh) -> Group:
        group = mesh.get_group()
        return Group(group.group_name, group.size(), group.rank()) if group.size() > 1 else ALONE


ALONE = Group("", 1, 0)


def local(parameter: nn.Parameter) -> Tensor:
    """This rank's piece of a parameter, for plain tensor code; its gradient is that of just this piece.

    A piece that is replicated over tp is only ever applied to tokens or heads that this rank alone owns, so its
    gradient is one summand of the whole: `titanmoe.parallel.tensor.sum_replicated` adds them up once per step.
    """
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Not differentiable: for counts, losses and other constants of the backward pass."""
    return x if group.size == 1 else _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.name))


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate every rank's x along dim. Not differentiable."""
    if group.size == 1:
        return x
    out = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    return out if dim == 0 else torch.cat(out.chunk(group.size), dim)


def _reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    if dim != 0:
        x = torch.cat(x.chunk(group.size, dim))
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), receive, send, group.name))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.dim, ctx.group), None, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Every rank's piece along dim -> the whole on every rank. Backward sums the ranks' gradients of each piece."""
    return x if group.size == 1 else _Gather.apply(x, dim, group)


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """A summand of the whole on every rank -> the sum's own piece along dim. Backward gathers the pieces' gradients."""
    return x if group.size == 1 else _ScatterSum.apply(x, dim, group)


def sum_over(x: Tensor, group: Group) -> Tensor:
    """A summand on every rank -> the sum on every rank, which each uses otherwise: backward sums what comes back."""
    return x if group.size == 1 else _SumOver.apply(x, group)


def all_to_all(x: Tensor, group: Group, send: list[int] | None = None, receive: list[int] | None = None) -> Tensor:
    """Rows of x to the group's ranks, send[r] of them to rank r; even pieces when no sizes are given."""
    if group.size == 1:
        return x
    if send is None or receive is None:
        send = receive = [x.shape[0] // group.size] * group.size
    return _AllToAll.apply(x, send, receive, group)
