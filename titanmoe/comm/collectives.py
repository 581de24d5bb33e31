"""Collectives of the forward and backward pass: differentiable, over a named group, no-ops on a group of one.

Every one waits for its result before it returns: a collective still in flight that enters a compiled region gives
silently wrong gradients in torch 2.13. The one exception is `start`, whose result nothing can touch before `arrive`.
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
from titanmoe.comm import turns
from titanmoe.comm.recomputation import cached, in_checkpointed_region, recomputing

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks that share one axis, or several, with this rank; plain values, so that compiled code can hold it."""

    name: str
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Group:
        return Group(group.group_name, group.size(), group.rank()) if group.size() > 1 else NO_GROUP

    @property
    def process_group(self) -> dist.ProcessGroup:
        return _resolve_process_group(self.name)


NO_GROUP = Group("", 1, 0)


def local(parameter: nn.Parameter) -> Tensor:
    """This rank's piece of a parameter, for plain tensor code; its gradient is that of this piece alone.

    A piece that is replicated over tp is only ever applied to tokens or heads that this rank alone owns, so its
    gradient is one summand of the whole: `titanmoe.parallel.parallel_plan.sum_replicated` adds them up once per step.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return parameter.to_local()
    return _Local.apply(parameter)


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, whose own backward works out the gradient's shape and placements each time, and takes more
    than twice as long for it. They are always the parameter's.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return _laid_out(grad.contiguous(), ctx.spec)


def _laid_out(part: Tensor, spec: Any) -> DTensor:
    return DTensor(part, copy.copy(spec), requires_grad=False)  # DTensor's operations write to a spec


def with_layout_of(parameter: DTensor, part: Tensor) -> DTensor:
    """A gradient of the parameter, of which this rank has that part."""
    return _laid_out(part, parameter._spec)


def local_whole(parameter: nn.Parameter) -> Tensor:
    """`local` for a router's parameter, which every rank has whole and FSDP leaves alone.

    Its gradient is a plain tensor. Before it adds two DTensors for the first time, torch weighs every combination of
    placements on the axes of their mesh: 0.05 to 0.3 s.
    """
    if not isinstance(parameter, DTensor) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return local(parameter)
    return _LocalWhole.apply(parameter)


class _LocalWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def wait(flying: Tensor, group: Group) -> Tensor:
    observe.waits(group.name)
    out = _ops.wait_tensor(flying)
    observe.arrived()
    return out


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce x over the group. Not differentiable: for counts, losses and other constants of the backward pass.

    Not sent again while backward recomputes a region (titanmoe.comm.recomputation).
    """
    return x if group.size == 1 else cached(lambda: _all_reduce(x, group, op))


def _all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    return wait(_ops.all_reduce(x.contiguous(), op, group.name), group)


def start_sum(x: Tensor, group: Group) -> Tensor:
    """Sums x in its own memory. Still in flight: call `wait` before anything else."""
    return _ops.all_reduce_(x, "sum", group.name)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate every rank's x along dim. Not differentiable.

    Not sent again while backward recomputes a region (titanmoe.comm.recomputation).
    """
    return x if group.size == 1 else cached(lambda: _all_gather(x, dim, group))


def _all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    x = x.contiguous()
    out = wait(_ops.all_gather_into_tensor(x, group.size, group.name), group)
    return _move_pieces(out, 0, dim, group.size)


def _move_pieces(x: Tensor, old: int, new: int, pieces: int) -> Tensor:
    """The equal pieces that lie along dim `old`, along dim `new`: a copy, unless all dims from one to the other have a
    single element in each piece, as the samples of a microbatch of one."""
    if old == new:
        # Not `x.contiguous()` of what is contiguous: torch 2.11 drops the gradient of a compiled autograd.Function
        # whose result comes from an operation that returned its own input.
        return x if x.is_contiguous() else x.contiguous()
    first, last = sorted((old, new))
    shape = list(x.shape)
    shape[old] //= pieces
    if math.prod(shape[first:last]) != 1:
        return torch.cat(x.chunk(pieces, old), new)
    shape[new] *= pieces
    return x.contiguous().view(shape)


def _reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    x = _move_pieces(x, dim, 0, group.size)
    return wait(_ops.reduce_scatter_tensor(x, "sum", group.size, group.name), group)


def send_rows(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Still in flight: call `wait` before anything else."""
    x = x.contiguous()
    return _ops.all_to_all_single(x, receive, send, group.name)


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    return wait(send_rows(x, send, receive, group), group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group, is_cached):
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group).detach() if is_cached else _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduce(grad, ctx.group), None


def gather(x: Tensor, dim: int, group: Group, small: bool = False) -> Tensor:
    """Every rank's piece along dim -> the whole on every rank. Backward sums the ranks' gradients of each piece.

    small: as of `start`.
    """
    return x if group.size == 1 else _Gather.apply(x, dim, group, small and in_checkpointed_region())


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """A summand on every rank -> each rank's piece of the sum along dim. Backward gathers the pieces' gradients."""
    return x if group.size == 1 else _ScatterSum.apply(x, dim, group)


def sum_over(x: Tensor, group: Group) -> Tensor:
    """A summand on every rank -> the sum on every rank, where each uses it differently: backward sums the gradients."""
    return x if group.size == 1 else _SumOver.apply(x, group)


# ---- all-to-all: at once, or in two calls between which something else is computed
#
#                 forward                 backward
#   all_to_all    sends and waits         sends the gradients and waits
#   start         sends                   waits for the gradients
#   arrive        waits                   sends the gradients


class InFlight(NamedTuple):
    """Rows in flight, from `start` to `arrive`. `mark` stands for them in the graph: empty, but with a gradient to pass
    on.

    So autograd knows the order, and so do the hooks of a module that takes them. On a group of one, mark is the rows.
    """

    mark: Tensor
    wire: _Wire | None
    rows: Tensor | None = None
    """What is in flight, if the code is traced."""


def start(
    x: Tensor, group: Group, send: list[int] | None = None, receive: list[int] | None = None, small: bool = False
) -> InFlight:
    """Send rows as `all_to_all` does, without waiting. What is computed between this and `arrive` overlaps with it, in
    backward too.

    Autograd runs the newest ready node first. So it reaches `arrive`, which sends the gradients, then everything that
    was computed in between, and finally this, which waits for them.

    Args:
        small: x is so small that where backward recomputes this, what arrived is cached and nothing is sent again.
    """
    if group.size == 1:
        return InFlight(x, None)
    wire = _Wire(*_splits(x, group, send, receive), group, small and in_checkpointed_region())
    if torch.compiler.is_compiling():
        mark, rows = _TracedStart.apply(x, wire.send, wire.receive, group)
        return InFlight(mark, wire, rows)
    return InFlight(_Start.apply(x, wire), wire)


def arrive(flight: InFlight) -> Tensor:
    """Wait for the rows that `start` sent to this rank, and return them. Called once for each start."""
    mark, wire, rows = flight
    if wire is None:
        return mark
    if rows is not None:
        return _TracedArrive.apply(mark, rows, wire.send, wire.receive, wire.group)
    return _Arrive.apply(mark, wire)


def send_back(x: Tensor, flight: InFlight) -> InFlight:
    """Start to send as many rows as arrived by `flight`, each to the rank that sent it."""
    wire = flight.wire
    return InFlight(x, None) if wire is None else start(x, wire.group, wire.receive, wire.send)


def all_to_all(x: Tensor, group: Group, send: list[int] | None = None, receive: list[int] | None = None) -> Tensor:
    """Send rows of x to the group's ranks, send[r] of them to rank r; equal pieces if no sizes are given."""
    if group.size == 1:
        return x
    return _AllToAll.apply(x, *_splits(x, group, send, receive), group)


def _splits(x: Tensor, group: Group, send: list[int] | None, receive: list[int] | None) -> tuple[list[int], list[int]]:
    if send is None or receive is None:
        send = receive = [x.shape[0] // group.size] * group.size
    return send, receive


class _Wire:
    """The sizes of an all-to-all in two calls, and what is in flight: rows in forward, their gradients in backward."""

    def __init__(self, send: list[int], receive: list[int], group: Group, is_cached: bool):
        """is_cached: whether recomputation uses what arrived in forward, and sends nothing."""
        self.send, self.receive, self.group, self.is_cached = send, receive, group, is_cached
        self.flying: Tensor | None = None

    def depart(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send rows, and return their mark."""
        self.flying = send_rows(x, send, receive, self.group)
        turns.mark_sent()
        return x.new_empty(0)

    def land(self) -> Tensor:
        """Wait for rows, and return them."""
        turns.hand_over()  # meanwhile another microbatch may compute
        flying, self.flying = self.flying, None
        return wait(flying, self.group)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire):
        ctx.wire = wire
        if wire.is_cached and recomputing():
            return x.new_empty(0)
        return wire.depart(x, wire.send, wire.receive)

    @staticmethod
    def backward(ctx, mark):
        return ctx.wire.land(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mark, wire):
        ctx.wire = wire
        return cached(wire.land).detach() if wire.is_cached else wire.land()

    @staticmethod
    def backward(ctx, grad):
        wire = ctx.wire
        return wire.depart(grad, wire.receive, wire.send), None


class _TracedStart(torch.autograd.Function):
    """`_Start` in a graph, which shows the compiler what is in flight. So the gradient of the mark is what is in flight
    in backward, and the mark has its shape: that of x. Nothing reads the mark, so compiled code does not make it."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        rows = send_rows(x, send, receive, group)
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
        return send_rows(grad, ctx.receive, ctx.send, ctx.group), None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None
