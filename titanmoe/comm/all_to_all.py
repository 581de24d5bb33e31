"""The all-to-all with a gradient: at once, or in two calls between which something else is computed.

                          forward                 backward
    all_to_all_autograd   sends and waits         sends the gradients and waits
    start_all_to_all      sends                   waits for the gradients
    finish_all_to_all     waits                   sends the gradients

Dispatchers send routed tokens in two calls: nothing can touch the result of the first before the second. On a group of
one rank all do nothing. All ranks of the group call each function together. Recomputation sends again, unless x is
`small`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.comm import interleave
from titanmoe.comm.collectives import Group, launch_all_to_all, wait
from titanmoe.comm.recomputation import cached, in_checkpointed_region, recomputing


class InFlight(NamedTuple):
    """An all-to-all in flight, from `start_all_to_all` to `finish_all_to_all`."""

    mark: Tensor
    """An empty tensor that stands for the all-to-all in the autograd graph and carries its gradient.

    So autograd knows the order of start and finish, and the hooks of a module that takes it see a tensor with a
    gradient. On a group of one rank, x itself.
    """
    transfer: _Transfer | None
    """The numbers of rows to and from each rank, and the tensor in flight; None on a group of one rank."""
    rows: Tensor | None = None
    """The tensor in flight where torch.compile traces the code; None in eager code."""


def start_all_to_all(x: Tensor, group: Group, send: list[int], receive: list[int], small: bool = False) -> InFlight:
    """Start an all-to-all of the rows of x (along dim 0); return without waiting. Differentiable.

    What is computed between this and `finish_all_to_all` overlaps with the message, in backward too: autograd reaches
    the backward of `finish_all_to_all`, which sends the gradients, then that of everything computed in between, and
    finally that of this function, which waits for the gradients.

    Args:
        x: the rows, sorted by receiving rank; not written to before `finish_all_to_all`.
        send: the number of rows of x for each rank of the group.
        receive: the number of rows from each rank of the group.
        small: whether x is so small that in a checkpointed region the received rows are cached, so that recomputation
            sends nothing.
    """
    if group.size == 1:
        return InFlight(x, None)
    transfer = _Transfer(send, receive, group, small and in_checkpointed_region())
    if torch.compiler.is_compiling():
        mark, rows = _TracedStart.apply(x, transfer.send, transfer.receive, group)
        return InFlight(mark, transfer, rows)
    return InFlight(_Start.apply(x, transfer), transfer)


def finish_all_to_all(flight: InFlight) -> Tensor:
    """Wait for the all-to-all of `start_all_to_all`; return the received rows, by sender. Call it once per start."""
    mark, transfer, rows = flight
    if transfer is None:
        return mark
    if rows is not None:
        return _TracedArrive.apply(mark, rows, transfer.send, transfer.receive, transfer.group)
    return _Arrive.apply(mark, transfer)


def start_reverse_all_to_all(x: Tensor, flight: InFlight) -> InFlight:
    """Start to return one row for each row that `flight` delivered, to the rank that sent that row. Differentiable.

    `finish_all_to_all` of the result gives each rank a row for each row that it sent, in their order.

    Args:
        x: the rows to return, of any width, in the order in which `finish_all_to_all(flight)` gave rows.
        flight: the all-to-all, finished, whose numbers of rows are reversed.
    """
    if (transfer := flight.transfer) is None:
        return InFlight(x, None)
    return start_all_to_all(x, transfer.group, transfer.receive, transfer.send)


def all_to_all_autograd(x: Tensor, group: Group) -> Tensor:
    """Send equal numbers of rows of x (along dim 0) to all ranks, wait, and return the received rows, by sender.

    Backward sends the gradients back.
    """
    if group.size == 1:
        return x
    return _AllToAll.apply(x, [x.shape[0] // group.size] * group.size, group)


class _Transfer:
    """The state of one `start_all_to_all`: numbers of rows per rank, and the tensor in flight.

    In forward, rows are in flight; in backward, their gradients.
    """

    def __init__(self, send: list[int], receive: list[int], group: Group, is_cached: bool):
        """Store how many of x's rows go to each rank and come from it in forward; backward reverses them.

        With `is_cached`, recomputation uses the rows that arrived in forward, and sends nothing.
        """
        self.send, self.receive, self.group, self.is_cached = send, receive, group, is_cached
        self.in_flight: Tensor | None = None

    def launch(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Start to send the rows of x, gradients in backward; return an empty tensor, its mark in the autograd graph.

        The rows themselves are in `in_flight`. An interleaved pair notes that its active side has sent something.

        Args:
            x: the rows.
            send: the number of rows of x for each rank; in backward the transfer's `receive`.
            receive: the number of rows from each rank, which `finish` returns; in backward the transfer's `send`.
        """
        self.in_flight = launch_all_to_all(x, send, receive, self.group)
        interleave.mark_sent()
        return x.new_empty(0)

    def finish(self) -> Tensor:
        """Wait for the rows in flight, and return them, by sender. Call it once per `launch`.

        In an interleaved pair the other side may compute first.
        """
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
    """The autograd function that starts an all-to-all in code that torch.compile traces.

    The tensors in flight are outputs and gradients that the compiler sees. In backward the gradient of the first
    output, the transfer's mark, is the tensor in flight, so the mark has the shape of x. Nothing reads the mark, so
    compiled code does not allocate it.
    """

    @staticmethod
    def forward(ctx, x, send, receive, group):
        rows = launch_all_to_all(x, send, receive, group)
        ctx.mark_non_differentiable(rows)
        return x.new_empty(x.shape), rows

    @staticmethod
    def backward(ctx, grad, _):
        return torch.ops._c10d_functional.wait_tensor(grad), None, None, None


class _TracedArrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mark, rows, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return torch.ops._c10d_functional.wait_tensor(rows)

    @staticmethod
    def backward(ctx, grad):
        return launch_all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, group):
        ctx.counts, ctx.group = counts, group
        return wait(launch_all_to_all(x, counts, counts, group), group)

    @staticmethod
    def backward(ctx, grad):
        return wait(launch_all_to_all(grad, ctx.counts, ctx.counts, ctx.group), ctx.group), None, None
