"""Collectives of the forward and backward pass over a named group; on a group of one they do nothing.

Functions named like `all_gather_autograd` are differentiable; the others are not. The differentiable all-to-all is in
titanmoe.comm.all_to_all. Each function waits for its result before it returns: a collective still in flight that enters
a compiled region gives silently wrong gradients in torch 2.13. The exceptions are those that begin with `launch`, whose
callers call `wait`; they cannot take NO_GROUP. On a GPU the stream waits, the host only for objects. Where backward
recomputes a region, differentiable functions send again, unless their tensor is `small`.

All ranks of the group call each function together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from titanmoe import observe
from titanmoe.comm.recomputation import cached, in_checkpointed_region

_ops = torch.ops._c10d_functional
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The ranks of a process group and this rank's place among them, as plain values that compiled code can hold."""

    name: str
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Group:
        """Describe a process group of torch; return NO_GROUP for one of a single rank."""
        return Group(group.group_name, group.size(), group.rank()) if group.size() > 1 else NO_GROUP

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group that torch has registered under `name`; NO_GROUP has none, and raises."""
        return _resolve_process_group(self.name)


NO_GROUP = Group("", 1, 0)
"""The group of a rank alone."""


def to_local(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a DTensor parameter as a plain tensor; return other parameters as they are.

    The gradient of the shard is not summed over ranks. A shard that is replicated over tp is only ever applied to
    tokens or heads that this rank alone owns, so its gradient is one summand of the full gradient:
    `titanmoe.parallel.parallel_plan.sum_replicated` sums these once per step.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return parameter.to_local()
    return _ToLocal.apply(parameter, parameter._spec)


class _ToLocal(torch.autograd.Function):
    """`DTensor.to_local` with a faster backward, whose gradient is a plain tensor if `spec` is None.

    DTensor's own backward works out the gradient's shape and placements each time, which takes more than twice as long.
    Both always equal the shape and placements of the parameter.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, spec: Any) -> Tensor:
        ctx.spec = spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        return grad if ctx.spec is None else _dtensor_of(grad, ctx.spec), None


def _dtensor_of(shard: Tensor, spec: Any) -> DTensor:
    return DTensor(shard, copy.copy(spec), requires_grad=False)  # DTensor's operations write to a spec


def gradient_from_local(parameter: DTensor, shard: Tensor) -> DTensor:
    """Wrap this rank's shard of a parameter's gradient as a DTensor with the parameter's mesh and placements.

    No communication.
    """
    return _dtensor_of(shard, parameter._spec)


def to_local_replicated(parameter: nn.Parameter) -> Tensor:
    """Return a parameter that every rank holds in full, such as a router's weight, as a plain tensor.

    Its gradient, which is not summed over ranks, is a plain tensor too, not a DTensor: before torch adds two DTensors
    for the first time, it weighs every combination of placements on the axes of their mesh, which takes 0.05 to 0.3 s.
    """
    if not isinstance(parameter, DTensor) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return to_local(parameter)
    return _ToLocal.apply(parameter, None)


def wait(in_flight: Tensor, group: Group) -> Tensor:
    """Wait for an asynchronous collective over `group`, on a GPU by its stream alone, and return its result.

    Observers (titanmoe.observe) are told of the wait before and after.

    Args:
        in_flight: the tensor that the start of the collective returned, such as by `launch_all_to_all`.
        group: the group of the collective.
    """
    observe.waits(group.name)
    out = _ops.wait_tensor(in_flight)
    observe.arrived()
    return out


def first_text(text: str) -> str:
    """Return the first non-empty text of all ranks, such as an error, in rank order; "" if all are empty.

    Collective over the world.
    """
    return next(filter(None, gather_objects(text, Group.of(dist.group.WORLD))), "")


def gather_objects(value: T, group: Group) -> list[T]:
    """Return the objects of all ranks, which are pickled, in the group's order. Collective over the group."""
    values = [value] * group.size
    if group.size > 1:
        dist.all_gather_object(values, value, group.process_group)
    return values


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce x over the group. Not differentiable: for counts, losses and other constants of the backward pass.

    x is not changed; on a group of one rank it is returned itself. While backward recomputes a checkpointed region, the
    result that forward cached is returned and nothing is sent (titanmoe.comm.recomputation).

    Args:
        x: this rank's summand.
        group: the ranks.
        op: how elements are combined: "sum", "max", "min" or another name that torch's collectives know.
    """
    return x if group.size == 1 else cached(lambda: _all_reduce(x, group, op))


def _all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    return wait(_ops.all_reduce(x.contiguous(), op, group.name), group)


def launch_broadcast(x: Tensor, source: int, group: Group) -> Tensor:
    """Start to send the source rank's x to every rank of the group. Call `wait` on the result before it is used.

    Args:
        x: the values on the source rank; on other ranks a tensor of the same shape and dtype. Not written to.
        source: the rank in the group whose values are sent.
        group: the ranks.
    """
    return _ops.broadcast(x.contiguous(), source, group.name)


def launch_reduce(x: Tensor, destination: int, group: Group) -> Callable[[], Tensor]:
    """Start to sum x over the group, in place on the destination rank; on others the values are undefined afterwards.

    Args:
        x: this rank's summand, contiguous, which nothing else uses meanwhile.
        destination: the rank in the group that gets the sum.
        group: the ranks.

    Returns:
        A function that waits for the message and returns x; every rank calls it.
    """
    work = dist.reduce(x, group=group.process_group, group_dst=destination, async_op=True)

    def finish() -> Tensor:
        observe.waits(group.name)
        work.wait()
        observe.arrived()
        return x

    return finish


def launch_all_gather(x: Tensor, group: Group) -> Tensor:
    """Start to concatenate every rank's x, all of one shape, along dim 0 in rank order.

    Call `wait` on the result before it is used.
    """
    return _ops.all_gather_into_tensor(x.contiguous(), group.size, group.name)


def launch_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Start to sum x over the group, in place. Call `wait` on the result before x or the result is used."""
    return _ops.all_reduce_(x, "sum", group.name)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate every rank's x, all of one shape, along dim in rank order. Not differentiable.

    While backward recomputes a checkpointed region, the result that forward cached is returned and nothing is sent
    (titanmoe.comm.recomputation).
    """
    return x if group.size == 1 else cached(lambda: _all_gather(x, dim, group))


def _all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    return _move_chunks(wait(launch_all_gather(x, group), group), 0, dim, group.size)


def _move_chunks(x: Tensor, old_dim: int, new_dim: int, chunks: int) -> Tensor:
    """Cut x into equal chunks along dim `old_dim`, and return them concatenated along dim `new_dim`.

    The result is contiguous; it may be x, or share its memory.
    """
    if old_dim == new_dim:
        # Not `x.contiguous()` of what is contiguous: torch 2.11 drops the gradient of a compiled autograd.Function
        # whose result comes from an operation that returned its own input.
        return x if x.is_contiguous() else x.contiguous()
    first, last = sorted((old_dim, new_dim))
    shape = list(x.shape)
    shape[old_dim] //= chunks
    if math.prod(shape[first:last]) != 1:
        return torch.cat(x.chunk(chunks, old_dim), new_dim)
    shape[new_dim] *= chunks
    return x.contiguous().view(shape)


def _reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    x = _move_chunks(x, dim, 0, group.size)
    return wait(_ops.reduce_scatter_tensor(x, "sum", group.size, group.name), group)


def launch_all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Start to send send[r] rows of x (along dim 0) to each rank r, and to receive receive[r] rows from it.

    Call `wait` on the result before it is used: the received rows, by sender.
    """
    return _ops.all_to_all_single(x.contiguous(), receive, send, group.name)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group, is_cached):
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group).detach() if is_cached else _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduce(grad, ctx.group), None


def all_gather_autograd(x: Tensor, dim: int, group: Group, small: bool = False) -> Tensor:
    """Concatenate every rank's x, all of one shape, along dim in rank order.

    Backward reduce-scatters: it sums the gradients of x over the ranks. `small` says that x is so small that in a
    checkpointed region the result is cached, so that recomputation does not gather again.
    """
    return x if group.size == 1 else _AllGather.apply(x, dim, group, small and in_checkpointed_region())


def reduce_scatter_autograd(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum x over the group and return this rank's chunk of the sum along dim, whose size the group's size divides.

    Backward all-gathers the gradients of the chunks.
    """
    return x if group.size == 1 else _ReduceScatter.apply(x, dim, group)


def all_reduce_autograd(x: Tensor, group: Group) -> Tensor:
    """Sum x over the group. Backward sums the gradients over the group.

    For sums that each rank uses differently, so that each rank's gradient of the sum is only one summand.
    """
    return x if group.size == 1 else _AllReduce.apply(x, group)
