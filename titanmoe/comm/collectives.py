"""Collectives of the forward and backward pass over a named group; on a group of one they do nothing.

Functions named like `all_gather_autograd`, and the all-to-all in two calls, are differentiable; the others are not.
Each one waits for its result before it returns: a collective still in flight that enters a compiled region gives
silently wrong gradients in torch 2.13. The exceptions are `start_all_to_all`, whose result nothing can touch before
`finish_all_to_all`, and those named like `launch_all_to_all`, whose callers call `wait` next.

All ranks of the group call each function together.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from titanmoe import observe
from titanmoe.comm import interleave
from titanmoe.comm.recomputation import cached, in_checkpointed_region, recomputing

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks that share one mesh axis, or several, with this rank.

    Plain values, so that compiled code can hold it.
    """

    name: str
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Group:
        """Return the group's name, size and this rank's number in it; NO_GROUP for a group of one."""
        return Group(group.group_name, group.size(), group.rank()) if group.size() > 1 else NO_GROUP

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of this name."""
        return _resolve_process_group(self.name)


NO_GROUP = Group("", 1, 0)
"""The group of a rank alone."""


def to_local(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a parameter as a plain tensor. Its gradient is that of the shard alone.

    A shard that is replicated over tp is only ever applied to tokens or heads that this rank alone owns. So its
    gradient is one summand of the full one: `titanmoe.parallel.parallel_plan.sum_replicated` sums them once per step.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return parameter.to_local()
    return _ToLocal.apply(parameter)


class _ToLocal(torch.autograd.Function):
    """`DTensor.to_local` with a faster backward.

    DTensor's own backward works out the gradient's shape and placements each time, which takes more than twice as long.
    They are always the parameter's.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return _dtensor_of(grad.contiguous(), ctx.spec)


def _dtensor_of(part: Tensor, spec: Any) -> DTensor:
    return DTensor(part, copy.copy(spec), requires_grad=False)  # DTensor's operations write to a spec


def gradient_from_local(parameter: DTensor, part: Tensor) -> DTensor:
    """Return the parameter's gradient as a DTensor, of which this rank has the shard `part`."""
    return _dtensor_of(part, parameter._spec)


def to_local_replicated(parameter: nn.Parameter) -> Tensor:
    """Return a parameter that every rank has in full, such as a router's, as a plain tensor.

    Its gradient is a plain tensor too. Before it adds two DTensors for the first time, torch weighs every combination
    of placements on the axes of their mesh: 0.05 to 0.3 s.
    """
    if not isinstance(parameter, DTensor) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return to_local(parameter)
    return _ToLocalReplicated.apply(parameter)


class _ToLocalReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def wait(in_flight: Tensor, group: Group) -> Tensor:
    """Wait for a result in flight, announce the wait to observers, and return the result."""
    observe.waits(group.name)
    out = _ops.wait_tensor(in_flight)
    observe.arrived()
    return out


def first_text(own: str) -> str:
    """Return the first text of any rank that is not empty; "" if all are. Collective over the world."""
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, own)
    return next(filter(None, texts), "")


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce x over the group. Not differentiable: for counts, losses and other constants of the backward pass.

    While backward recomputes a region, the cached result is returned and nothing is sent (titanmoe.comm.recomputation).
    """
    return x if group.size == 1 else cached(lambda: _all_reduce(x, group, op))


def _all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    return wait(_ops.all_reduce(x.contiguous(), op, group.name), group)


def launch_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Start to sum x over the group, in x's own memory. Call `wait` on the result before anything else."""
    return _ops.all_reduce_(x, "sum", group.name)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate every rank's x along dim. Not differentiable.

    While backward recomputes a region, the cached result is returned and nothing is sent (titanmoe.comm.recomputation).
    """
    return x if group.size == 1 else cached(lambda: _all_gather(x, dim, group))


def _all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    x = x.contiguous()
    out = wait(_ops.all_gather_into_tensor(x, group.size, group.name), group)
    return _move_chunks(out, 0, dim, group.size)


def _move_chunks(x: Tensor, old: int, new: int, chunks: int) -> Tensor:
    """Move equal chunks that lie along dim `old` to dim `new`.

    Copies, unless all dims from one to the other have a single element in each chunk, as the samples of a microbatch of
    one.
    """
    if old == new:
        # Not `x.contiguous()` of what is contiguous: torch 2.11 drops the gradient of a compiled autograd.Function
        # whose result comes from an operation that returned its own input.
        return x if x.is_contiguous() else x.contiguous()
    first, last = sorted((old, new))
    shape = list(x.shape)
    shape[old] //= chunks
    if math.prod(shape[first:last]) != 1:
        return torch.cat(x.chunk(chunks, old), new)
    shape[new] *= chunks
    return x.contiguous().view(shape)


def _reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    x = _move_chunks(x, dim, 0, group.size)
    return wait(_ops.reduce_scatter_tensor(x, "sum", group.size, group.name), group)


def launch_all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Start to send rows of x, send[r] of them to rank r. Call `wait` on the result before anything else."""
    x = x.contiguous()
    return _ops.all_to_all_single(x, receive, send, group.name)


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    return wait(launch_all_to_all(x, send, receive, group), group)


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
    """Concatenate every rank's x along dim. Backward sums the ranks' gradients of each rank's x.

    Args:
        small: as of `start_all_to_all`.
    """
    return x if group.size == 1 else _AllGather.apply(x, dim, group, small and in_checkpointed_region())


def reduce_scatter_autograd(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum x over the group and return this rank's chunk of the sum along dim.

    Backward gathers the gradients of all chunks.
    """
    return x if group.size == 1 else _ReduceScatter.apply(x, dim, group)


def all_reduce_autograd(x: Tensor, group: Group) -> Tensor:
    """Sum x over the group, for ranks that each use the sum differently. Backward sums their gradients."""
    return x if group.size == 1 else _AllReduce.apply(x, group)


# ---- all-to-all: at once, or in two calls between which something else is computed
#
#                 forward                 backward
#   all_to_all    sends and waits         sends the gradients and waits
#   start         sends                   waits for the gradients
#   arrive        waits                   sends the gradients


class InFlight(NamedTuple):
    """Rows in flight, from `start_all_to_all` to `finish_all_to_all`.

    `mark` stands for them in the autograd graph: it is empty, but carries a gradient. So autograd knows the order, and
    so do the hooks of a module that takes it. On a group of one, mark is the rows.
    """

    mark: Tensor
    transfer: _Transfer | None
    rows: Tensor | None = None
    """The tensor in flight, if the code is traced."""


def start_all_to_all(
    x: Tensor, group: Group, send: list[int] | None = None, receive: list[int] | None = None, small: bool = False
) -> InFlight:
    """Send rows as `all_to_all_autograd` does, without waiting.

    What is computed between this and `finish_all_to_all` overlaps with the message, in backward too: autograd runs the
    newest ready node first. So it reaches `finish_all_to_all`, which sends the gradients, then everything that was
    computed in between, and finally this, which waits for them.

    Args:
        send: the number of rows of x for each rank; None for equal numbers.
        receive: the number of rows from each rank.
        small: x is so small that where backward recomputes this, what arrived is cached and nothing is sent again.
    """
    if group.size == 1:
        return InFlight(x, None)
    transfer = _Transfer(*_splits(x, group, send, receive), group, small and in_checkpointed_region())
    if torch.compiler.is_compiling():
        mark, rows = _TracedStart.apply(x, transfer.send, transfer.receive, group)
        return InFlight(mark, transfer, rows)
    return InFlight(_Start.apply(x, transfer), transfer)


def finish_all_to_all(flight: InFlight) -> Tensor:
    """Wait for the rows that `start_all_to_all` sent to this rank, and return them. Called once for each start."""
    mark, transfer, rows = flight
    if transfer is None:
        return mark
    if rows is not None:
        return _TracedArrive.apply(mark, rows, transfer.send, transfer.receive, transfer.group)
    return _Arrive.apply(mark, transfer)


def start_reverse_all_to_all(x: Tensor, flight: InFlight) -> InFlight:
    """Start to send as many rows as arrived by `flight`, each to the rank that sent it."""
    transfer = flight.transfer
    return (
        InFlight(x, None) if transfer is None else start_all_to_all(x, transfer.group, transfer.receive, transfer.send)
    )


def all_to_all_autograd(
    x: Tensor, group: Group, send: list[int] | None = None, receive: list[int] | None = None
) -> Tensor:
    """Send rows of x to the group's ranks, send[r] of them to rank r; equal chunks if no sizes are given."""
    if group.size == 1:
        return x
    return _AllToAll.apply(x, *_splits(x, group, send, receive), group)


def _splits(x: Tensor, group: Group, send: list[int] | None, receive: list[int] | None) -> tuple[list[int], list[int]]:
    if send is None or receive is None:
        send = receive = [x.shape[0] // group.size] * group.size
    return send, receive


class _Transfer:
    """The sizes of an all-to-all in two calls, and its tensor in flight: rows in forward, gradients in backward."""

    def __init__(self, send: list[int], receive: list[int], group: Group, is_cached: bool):
        """Store the sizes.

        Args:
            is_cached: whether recomputation uses what arrived in forward, and sends nothing.
        """
        self.send, self.receive, self.group, self.is_cached = send, receive, group, is_cached
        self.in_flight: Tensor | None = None

    def launch(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Start to send rows, and return their mark."""
        self.in_flight = launch_all_to_all(x, send, receive, self.group)
        interleave.mark_sent()
        return x.new_empty(0)

    def finish(self) -> Tensor:
        """Wait for the rows in flight, and return them."""
        interleave.yield_if_sent()  # meanwhile another microbatch may compute
        in_flight, self.in_flight = self.in_flight, None
        return wait(in_flight, self.group)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, transfer):
        ctx.transfer = transfer
        if transfer.is_cached and recomputing():
            return x.new_empty(0)
        return transfer.launch(x, transfer.send, transfer.receive)

    @staticmethod
    def backward(ctx, mark):
        return ctx.transfer.finish(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mark, transfer):
        ctx.transfer = transfer
        return cached(transfer.finish).detach() if transfer.is_cached else transfer.finish()

    @staticmethod
    def backward(ctx, grad):
        transfer = ctx.transfer
        return transfer.launch(grad, transfer.receive, transfer.send), None


class _TracedStart(torch.autograd.Function):
    """`_Start` in a graph, which shows the compiler what is in flight.

    The gradient of the mark is what is in flight in backward, so the mark has its shape: that of x. Nothing reads the
    mark, so compiled code does not make it.
    """

    @staticmethod
    def forward(ctx, x, send, receive, group):
        rows = launch_all_to_all(x, send, receive, group)
        ctx.mark_non_differentiable(rows)
        return x.new_empty(x.shape), rows

    @staticmethod
    def backward(ctx, grad, _):
        return _ops.wait_tensor(grad), None, None, None


class _TracedArrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mark, rows, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _ops.wait_tensor(rows)

    @staticmethod
    def backward(ctx, grad):
        return launch_all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None
