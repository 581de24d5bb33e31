"""Buffers in torch's symmetric memory, and the exchange of rows through them: each rank writes to the others' buffers.

Every rank of a dispatch group maps the receive buffers of the others. `exchange` writes rows to their places in them
and returns what arrived; in compiled graphs and under torch's dispatch modes it is the operation `titanmoe::exchange`.
`rows` are routed tokens (N, D), and perhaps their routing weights (N, 1). `to_N` is the place to which each row goes,
rank * limit + slot of that rank's buffer, or -1 for nowhere; `from_M` the place from which each slot of this rank's
buffer gets its row, -1 for an unused slot.

Shapes: D model, E experts, G ranks of the dispatch group, N rows that leave and M that arrive, either way: S slots of
the send buffer and R of the receive buffer in dispatch, R and S in combine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from titanmoe.comm.collectives import NO_GROUP, first_text
from titanmoe.comm.recomputation import save_tensors
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.dispatchers.dispatcher import CannotReserve, ExpertRanks, SharedBuffers
from titanmoe.moe.dispatchers.dispatcher_spec import symm_mem_sizes
from titanmoe.moe.dispatchers.symmetric_places import places
from titanmoe.ops import device as devices
from titanmoe.ops.cpu import shared_memory
from titanmoe.ops.kernels import fused

Arrived = TypeVar("Arrived")


def missing(device: str) -> str:
    """Return why this machine lacks symmetric memory (CPUs: shared memory); "" if it has it, or imitates a GPU.

    Whether ranks reach each other's memory is not checked. `device` is training.device.
    """
    kind = devices.kind_of_setting(device)
    if devices.is_imitated() and kind == "cuda":
        return ""  # we cannot know what that machine has
    if kind == "cpu":
        return shared_memory.missing()
    if kind == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU"
    if symm_mem.get_backend(torch.device(kind)) is None:
        return f"PyTorch {torch.__version__} has no symmetric memory on {kind}"
    return ""


def exchange_steps(barrier: Callable[[], None], put: Callable[[], None], take: Callable[[], Arrived]) -> Arrived:
    """Exchange rows through receive buffers, in the order of steps that keeps ranks from overwriting unread rows.

    Collective over the group. On GPUs the steps are launched on the current stream. The same buffer receives in every
    exchange, of any layer, microbatch and direction.

    Args:
        barrier: returns once all ranks have called it; writes before it are finished, and visible after it.
        put: writes this rank's rows to the others' buffers.
        take: copies what arrived out of this rank's buffer.

    Returns:
        What `take` returns.
    """
    barrier()  # all ranks have taken what arrived in the exchange before
    put()
    barrier()  # all rows have arrived
    return take()


def plain_put(x_ND: Tensor, to_N: Tensor, buffers: Sequence[Tensor]) -> None:
    """Write each row to its place in the ranks' buffers, by operations of torch: the reference of a kernel.

    Rows whose place is -1 or in another buffer are written to the last row of each buffer, which nobody reads.
    `buffers` are the buffers of the ranks, with limit + 1 rows each.
    """
    limit = len(buffers[0]) - 1
    for rank, buffer in enumerate(buffers):
        row_N = to_N - rank * limit
        buffer[row_N.where((row_N >= 0) & (row_N < limit), limit)] = x_ND


def plain_take(buffer_ND: Tensor, from_N: Tensor) -> Tensor:
    """Return a copy of a receive buffer, with zeros in unused slots, by operations of torch: the reference of a kernel.

    `from_N` says where each slot's row came from; -1 for an unused slot, which nobody wrote.
    """
    return buffer_ND.where((from_N >= 0).unsqueeze(1), 0)


def allocate_shared(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Allocate a buffer on this rank that the ranks of `group` map into their memory. Collective over the world.

    Returns:
        The buffer, and a handle with `get_remote_tensor(rank, shape, dtype)` for the other ranks' buffers and
        `barrier()`, a wait for all ranks of `group`.

    Raises:
        RuntimeError: on all ranks of the world, if one of them cannot allocate.
    """
    return devices.choose(device, _allocate_on_gpus, cpu=shared_memory.allocate_shared)(shape, dtype, device, group)


def _allocate_on_gpus(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Allocate a buffer in torch's symmetric memory of CUDA, with undefined contents. Collective over the world.

    It is `allocate_shared` on GPUs.
    """
    buffer, problem = None, ""
    try:
        if symm_mem.get_backend(device) != "CUDA":
            symm_mem.set_backend("CUDA")
        buffer = symm_mem.empty(*shape, dtype=dtype, device=device)
    except RuntimeError as error:
        problem = str(error)
    if problem := first_text(problem):  # before any rank waits for the others
        raise RuntimeError(problem)
    return buffer, symm_mem.rendezvous(buffer, group.group_name)


class Buffers(NamedTuple):
    """The receive buffers of all ranks of a group for rows of one width, (limit + 1, width) each."""

    of_ranks: list[Tensor]
    """The buffer of each rank, mapped into this rank's memory."""
    addresses_G: Tensor
    """The address of each rank's buffer, for kernels."""


class SymmetricBuffers(SharedBuffers):
    """The receive buffers in symmetric memory, for routed tokens and their weights, shared by a rank's MoE layers.

    Creating an instance is collective over the world, and all ranks have buffers of equal sizes.
    """

    by_name: WeakValueDictionary[str, SymmetricBuffers] = WeakValueDictionary()
    """Instances of this process, by name.

    A torch operation takes only tensors and plain values, so it gets a name, as functional collectives get a process
    group's.
    """
    numbers = itertools.count()

    def __init__(
        self,
        model: Model,
        options: MoEOptions,
        ranks: ExpertRanks,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(device)
        self.ranks, self.group, self.kernels = ranks, ranks.group, options.kernels
        self.name = f"buffers {next(self.numbers)} of group {self.group.name}"
        self.by_name[self.name] = self
        self.send_slots = tokens * model.top_k * ranks.etp
        self.receive_slots, self.limit = symm_mem_sizes(model, options.symm_mem_factor, tokens, ranks.ep, ranks.etp)
        if self.group == NO_GROUP:
            return
        self.handles = []
        wide = torch.promote_types(dtype, getattr(torch, options.router_dtype))
        self.rows, self.weights = (self.allocate(*kind, device) for kind in ((model.dim, dtype), (1, wide)))
        self.check_first_exchange(model.num_experts)

    def allocate(self, width: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        """Allocate receive buffers for rows of this width and dtype. Collective over the world.

        Raises:
            CannotReserve: on all ranks, if these ranks cannot share memory; RuntimeError instead if memory runs out.
        """
        shape, problem = (self.limit + 1, width), ""
        try:
            local, handle = allocate_shared(shape, dtype, device, self.group.process_group)
        except RuntimeError as error:  # a container, for example, that forbids what sharing memory takes
            if "out of memory" in str(error):
                raise
            problem = str(error).strip().partition("\n")[0]
        if problem := first_text(problem):
            raise CannotReserve(f"PyTorch {torch.__version__} cannot share memory between these ranks: {problem}")
        self.handles.append((local, handle))  # for as long as a peer may write
        of_ranks = [handle.get_remote_tensor(rank, shape, dtype) for rank in range(self.group.size)]
        return Buffers(of_ranks, torch.tensor([buffer.data_ptr() for buffer in of_ranks], device=device))

    @property
    def size(self) -> int:
        """The bytes of the receive buffers that this rank allocated; 0 if it has all experts, and nothing is sent."""
        if self.group == NO_GROUP:
            return 0
        return sum(buffers.of_ranks[self.group.rank].nbytes for buffers in (self.rows, self.weights))

    def metrics(self) -> dict[str, float]:
        """Return {"overflow_reruns": the number of steps so far that were repeated because a buffer was too small}."""
        return {"overflow_reruns": self.repeats}

    def exchange(self, rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor) -> tuple[Tensor, ...]:
        """Write rows to their places in the ranks' buffers, wait, and return what arrived. Collective over the group.

        On GPUs the stream waits, not the host.

        Returns:
            For each of `rows`, a copy of this rank's buffer, with zeros in unused slots. Not differentiable.
        """
        buffers = (self.rows, self.weights)[: len(rows)]
        barrier = self.handles[0][1].barrier  # on GPUs the stream waits, not the host
        return exchange_steps(barrier, partial(self.put, rows, buffers, to_N), partial(self.take, buffers, from_M))

    def put(self, rows: Sequence[Tensor], buffers: Sequence[Buffers], to_N: Tensor) -> None:
        """Write this rank's rows to the buffers of all ranks: the step of `exchange` between its two barriers.

        Does not wait for other ranks. `buffers` are the ranks' receive buffers for each of `rows`.
        """
        for x_ND, (of_ranks, addresses_G) in zip(rows, buffers, strict=True):
            if fused(self.kernels, x_ND):
                from titanmoe.ops.kernels import put

                put.put_rows(x_ND, to_N, addresses_G, self.limit)
            else:
                plain_put(x_ND, to_N, of_ranks)

    def take(self, buffers: Sequence[Buffers], from_M: Tensor) -> tuple[Tensor, ...]:
        """Copy what has arrived out of this rank's buffers, with zeros in unused slots: the last step of `exchange`.

        `buffers` are the ranks' receive buffers for each of the rows; one copy of each is returned.
        """
        arrived = [of_ranks[self.group.rank][: len(from_M)] for of_ranks, _ in buffers]
        if fused(self.kernels, arrived[0]):
            from titanmoe.ops.kernels.put import take_rows as take
        else:
            take = plain_take
        return tuple(take(x_MD, from_M) for x_MD in arrived)

    def check_first_exchange(self, num_experts: int) -> None:
        """Test the buffers: send rows that name their origin to other ranks and back. Collective over the world.

        Each rank sends one row each to half of the experts, as far as the send buffer allows. The buffers for weights
        are not tested.

        Raises:
            CannotReserve: on all ranks, if a row arrives wrong on any rank.
        """
        group, device, dtype = self.group, self.rows.of_ranks[0].device, self.rows.of_ranks[0].dtype
        width, rows = self.rows.of_ranks[0].shape[1], min(self.send_slots, num_experts * self.ranks.etp)

        def names(place_N: Tensor) -> Tensor:  # of numbers that bfloat16 has
            row_N = place_N % self.limit
            name_N3 = torch.stack((place_N // self.limit + 1, row_N // 256, row_N % 256), 1).to(dtype)
            return name_N3.repeat(1, width // 3 + 1)[:, :width].where((place_N >= 0).unsqueeze(1), 0)

        sender_G1 = torch.arange(group.size, device=device).unsqueeze(1)
        expert_E = torch.arange(num_experts, device=device)
        sent_GE = ((sender_G1 + expert_E) % 2) * (expert_E < rows // self.ranks.etp)
        to_S, from_R, *_ = places(sent_GE, self.ranks, self.limit, rows, self.receive_slots)
        own_SD = names(torch.arange(rows, device=device) + group.rank * self.limit)
        (away_RD,) = send([own_SD], to_S, from_R, self.name)
        (home_SD,) = send([away_RD], from_R, to_S, self.name)
        right = torch.equal(away_RD, names(from_R)) and torch.equal(home_SD, own_SD.where((to_S >= 0).unsqueeze(1), 0))
        wrong = torch.tensor([float(not right)], device=device)
        dist.all_reduce(wrong)
        if wrong:
            raise CannotReserve(
                f"rows of a first exchange came out wrong on {int(wrong)} of {dist.get_world_size()} ranks (PyTorch "
                f"{torch.__version__})"
            )


def exchange(rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor, memory: str) -> tuple[Tensor, ...]:
    """Write rows to their places in the ranks' buffers, and return what arrived. Collective over the group.

    Differentiable: gradients are sent back to where the rows came from. In a compiled graph it is one operation,
    `titanmoe::exchange`, which returns new tensors and gets no buffer: a compiler that sees an operation change a
    buffer may hand it a copy, and then write that copy over what other ranks have sent. `memory` is the name of the
    `SymmetricBuffers`.
    """
    if torch.compiler.is_compiling():
        return tuple(exchange_op(list(rows), to_N, from_M, memory))
    with save_tensors():
        return ExchangeRows.apply(memory, to_N, from_M, *rows)


class ExchangeRows(torch.autograd.Function):
    """The differentiable operation `titanmoe::exchange`, called without torch's dispatcher.

    The dispatcher takes the host longer than launching the kernels.
    """

    @staticmethod
    def forward(ctx: Any, memory: str, to_N: Tensor, from_M: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.memory = memory
        ctx.save_for_backward(to_N, from_M)
        return tuple(send(rows, to_N, from_M, memory))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_N, from_M = ctx.saved_tensors
        return None, None, None, *send(grads, from_M, to_N, ctx.memory)


def send(rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor, memory: str) -> list[Tensor]:
    """Write rows to their places in the ranks' buffers; return copies of what arrived, and 0 where from_M is -1.

    Not differentiable; collective. Under a torch dispatch mode, such as one that records messages, it goes through the
    operation `titanmoe::exchange`, which the mode sees. `memory` is the name of the `SymmetricBuffers`.
    """
    return (exchange_op if is_in_torch_dispatch_mode() else _exchange)(list(rows), to_N, from_M, memory)


def _exchange(rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor, memory: str) -> list[Tensor]:
    """Exchange rows through the buffers with this name: the body of the operation `titanmoe::exchange`."""
    return list(SymmetricBuffers.by_name[memory].exchange(rows, to_N, from_M))


exchange_op = torch.library.custom_op("titanmoe::exchange", _exchange, mutates_args=())
exchange_op.register_effect(_EffectType.ORDERED)  # never merged, removed, moved or recomputed


@exchange_op.register_fake
def _(rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor, memory: str) -> list[Tensor]:
    """Return empty tensors of the shapes of `_exchange`'s results, for tracing. Sends nothing."""
    return [x_ND.new_empty(from_M.shape[0], x_ND.shape[1]) for x_ND in rows]


def _save_places(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _, to_N, from_M, ctx.memory = inputs
    ctx.save_for_backward(to_N, from_M)


def _exchange_gradients(ctx: Any, grads: list[Tensor]) -> tuple:
    """Return the gradients of the rows: those of what arrived, sent to where it came from. Collective."""
    to_N, from_M = ctx.saved_tensors
    return exchange_op(grads, from_M, to_N, ctx.memory), None, None, None


exchange_op.register_autograd(_exchange_gradients, setup_context=_save_places)
