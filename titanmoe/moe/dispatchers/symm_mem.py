"""The dispatcher `symm_mem`: writes routed tokens into the memory of their experts' ranks, over NVLink.

Sizes stay on the device, so the host never waits. Every rank of a group maps the others' receive buffers (torch's
symmetric memory). All ranks first gather how many routed tokens each has for each expert. From these counts a rank
knows where in the expert's rank's buffer each of its routed tokens belongs, and where each that arrives comes from. So
it writes its routed tokens to their places, by expert and then by sender, and the experts' outputs go back to the slots
of the sender that they came from; each is the other's backward.

An over-subscription factor sets the size of the receive buffer. If any rank of the group would receive more than fits,
no rank sends anything and a flag is set: the step is then repeated without the buffers, which is exact
(`Gradients.sums`).

A rank alone has no group and allocates nothing. A group of one that has a name, such as the world's in a single
process, sends its routed tokens to itself through its own buffer: so all of this can be tested on one GPU.

Shapes as in titanmoe.moe.dispatchers.dispatcher, with S = T * K * etp slots of the send buffer, the unused ones last,
and R slots of the receive buffer: every expert has a multiple of ALIGN, those after its routed tokens and after all
experts' unused. G ranks as senders, P the same ranks as receivers. N rows that leave and M that arrive, either way. A
place is rank * limit + slot, and -1 is nowhere.
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

from titanmoe.comm.collectives import NO_GROUP, all_gather, first_text
from titanmoe.comm.recomputation import save_tensors
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.moe.dispatchers.dispatcher import CannotReserve, Dispatcher, Exchange, ExpertRanks, SharedBuffers
from titanmoe.moe.dispatchers.dispatcher_spec import ALIGN, symm_mem_sizes
from titanmoe.moe.permute import unpermute_tokens
from titanmoe.moe.send_slots import Route, assign_unpadded_slots, fill_slots
from titanmoe.observe import named
from titanmoe.ops import device as devices
from titanmoe.ops.cpu import shared_memory
from titanmoe.ops.kernels import fused

Arrived = TypeVar("Arrived")


def missing(device: str) -> str:
    """Return why this machine cannot send through symmetric memory; "" if it can.

    Args:
        device: the value of training.device.
    """
    if devices.is_imitated() and devices.kind_of_setting(device) == "cuda":
        return ""  # we cannot know what that machine has
    kind = devices.kind_of_setting(device) if device == "auto" else device
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


class Places(NamedTuple):
    """Source and destination of each routed token in the buffers of a dispatch group, as one rank sees them.

    A place is rank * limit + slot of that rank's buffer; -1 is nowhere.
    """

    to_S: Tensor
    """The place in a receive buffer to which each slot of this rank's send buffer goes."""
    from_R: Tensor
    """The place in a send buffer from which each slot of this rank's receive buffer comes."""
    slots_e: Tensor
    """The number of slots of each local expert in the receive buffer, a multiple of ALIGN."""
    fits: Tensor
    """Whether the routed tokens of every rank fit into its receive buffer, a scalar. If not, nothing is sent."""
    overflows: Tensor
    """Whether the routed tokens for this rank do not fit into its receive buffer, a scalar."""


def places(count_GE: Tensor, ranks: ExpertRanks, limit: int, send_slots: int, receive_slots: int) -> Places:
    """Compute where each routed token goes to and comes from in the buffers of a dispatch group.

    Runs on the device, without a host sync or a message. A place is rank * limit + slot of that rank's buffer.

    Args:
        count_GE: the number of routed tokens from each sending rank for each expert.
        ranks: the ranks that hold the experts.
        limit: at least the slots of each buffer.
        send_slots: S, the slots of this rank's send buffer.
        receive_slots: R, the slots of this rank's receive buffer.
    """
    rank = ranks.group.rank
    # By sender, receiver and local expert: all etp ranks of an expert get its rows.
    size_GPe = count_GE.view(len(count_GE), ranks.ep, -1).repeat_interleave(ranks.etp, 1)
    need_P = aligned_counts(size_GPe.sum(0)).sum(1)
    fits = (need_P <= receive_slots).all()
    size_GPe = size_GPe * fits
    slots_Pe = aligned_counts(size_GPe.sum(0))
    first_GPe = (size_GPe.flatten(1).cumsum(1) - size_GPe.flatten(1)).view_as(size_GPe)  # in the send buffer
    place_GPe = slots_Pe.cumsum(1) - slots_Pe + size_GPe.cumsum(0) - size_GPe  # in the receive buffer
    begin_G1 = (torch.arange(len(count_GE), device=count_GE.device) * limit).unsqueeze(1)
    to_S = _counterparts(size_GPe[rank], first_GPe[rank], place_GPe[rank] + begin_G1, send_slots)
    size_eG, first_eG, place_eG = (x[:, rank].t() for x in (size_GPe, first_GPe, place_GPe))
    from_R = _counterparts(size_eG, place_eG, first_eG + begin_G1.t(), receive_slots)
    return Places(to_S, from_R, slots_Pe[rank], fits, need_P[rank] > receive_slots)


def _counterparts(size: Tensor, begin: Tensor, other: Tensor, rows: int) -> Tensor:
    """Map rows of a buffer to places by ranges: row begin[i] + j goes to place other[i] + j, for j < size[i].

    Args:
        size: the number of rows of each range; ranges ascend and do not overlap.
        begin: the first row of each range.
        other: the place that the first row of each range maps to; the others follow one by one.
        rows: the number of rows.

    Returns:
        The place of each of `rows` rows; -1 for a row in no range.
    """
    size, begin, other = (x.flatten() for x in (size, begin, other))
    row = torch.arange(rows, device=size.device)
    # The interval that ends behind the row; inductor searches no view, which `begin` may be.
    interval = torch.searchsorted(begin + size, row, right=True).clamp(max=len(begin) - 1)
    offset = row - begin[interval]
    return (other[interval] + offset).where((offset >= 0) & (offset < size[interval]), -1)


def aligned_counts(total: Tensor) -> Tensor:
    """Round counts of routed tokens up to a multiple of ALIGN, at least ALIGN: the slots of each expert's buffer."""
    return ((total + ALIGN - 1) // ALIGN * ALIGN).clamp(min=ALIGN)


def plain_put(x_ND: Tensor, to_N: Tensor, buffers: Sequence[Tensor]) -> None:
    """Write each row to its place in the ranks' buffers, by operations of torch: the reference of a kernel.

    Rows whose place is -1 or in another buffer are written to the last row of each buffer, which nobody reads.

    Args:
        x_ND: the rows.
        to_N: the place of each row, rank * limit + row of that rank's buffer; -1 for a row that is not sent.
        buffers: the buffer of each rank, with limit + 1 rows.
    """
    limit = len(buffers[0]) - 1
    for rank, buffer in enumerate(buffers):
        row_N = to_N - rank * limit
        buffer[row_N.where((row_N >= 0) & (row_N < limit), limit)] = x_ND


def plain_take(buffer_ND: Tensor, from_N: Tensor) -> Tensor:
    """Return a copy of a receive buffer, with zeros in unused slots, by operations of torch: the reference of a kernel.

    Args:
        buffer_ND: the slots of the buffer.
        from_N: where each slot's row came from; -1 for an unused slot, which nobody wrote.
    """
    return buffer_ND.where((from_N >= 0).unsqueeze(1), 0)


def allocate_shared(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Allocate a buffer on this rank that the ranks of `group` map into their memory. Collective over the world.

    Returns:
        The buffer, and a handle with `get_remote_tensor` for the other ranks' buffers and `barrier`.
    """
    return devices.choose(device, _allocate_on_gpus, cpu=shared_memory.allocate_shared)(shape, dtype, device, group)


def _allocate_on_gpus(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    own, problem = None, ""
    try:
        if symm_mem.get_backend(device) != "CUDA":
            symm_mem.set_backend("CUDA")
        own = symm_mem.empty(*shape, dtype=dtype, device=device)
    except RuntimeError as error:
        problem = str(error)
    if problem := first_text(problem):  # before any rank waits for the others
        raise RuntimeError(problem)
    return own, symm_mem.rendezvous(own, group.group_name)


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
    """All instances of this process by name.

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
            CannotReserve: on all ranks, if these ranks cannot share memory.
        """
        shape, problem = (self.limit + 1, width), ""
        try:
            own, handle = allocate_shared(shape, dtype, device, self.group.process_group)
        except RuntimeError as error:  # a container, for example, that forbids what sharing memory takes
            if "out of memory" in str(error):
                raise
            problem = str(error).strip().partition("\n")[0]
        if problem := first_text(problem):
            raise CannotReserve(f"PyTorch {torch.__version__} cannot share memory between these ranks: {problem}")
        self.handles.append((own, handle))  # for as long as a peer may write
        of_ranks = [handle.get_remote_tensor(rank, shape, dtype) for rank in range(self.group.size)]
        return Buffers(of_ranks, torch.tensor([buffer.data_ptr() for buffer in of_ranks], device=device))

    @property
    def size(self) -> int:
        """The bytes of the receive buffers that this rank allocated."""
        return sum(buffers.of_ranks[self.group.rank].nbytes for buffers in (self.rows, self.weights))

    def metrics(self) -> dict[str, float]:
        """Return {"overflow_reruns": the number of steps so far that were repeated because a buffer was too small}."""
        return {"overflow_reruns": self.repeats}

    def barrier(self) -> None:
        """Wait until all ranks of the group have called this; on GPUs the stream waits, not the host."""
        self.handles[0][1].barrier()

    def exchange(self, rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor) -> tuple[Tensor, ...]:
        """Write rows to their places in the ranks' buffers, wait, and return what arrived. Collective over the group.

        Args:
            rows: routed tokens (N, D), and perhaps their routing weights (N, 1).
            to_N: the place to which each row goes, rank * limit + slot of that rank's buffer; -1 for nowhere.
            from_M: the place from which each slot of this rank's buffer gets its row; -1 for an unused slot.

        Returns:
            For each of `rows`, a copy of this rank's buffer, with zeros in unused slots.
        """
        buffers = (self.rows, self.weights)[: len(rows)]
        return exchange_steps(self.barrier, partial(self.put, rows, buffers, to_N), partial(self.take, buffers, from_M))

    def put(self, rows: Sequence[Tensor], buffers: Sequence[Buffers], to_N: Tensor) -> None:
        """Write this rank's rows to the buffers of all ranks, without waiting for any: the first step of `exchange`.

        Args:
            rows: routed tokens (N, D), and perhaps their routing weights (N, 1).
            buffers: the ranks' receive buffers for each of `rows`.
            to_N: the place to which each row goes, rank * limit + slot of that rank's buffer; -1 for nowhere.
        """
        for x_ND, (of_ranks, addresses_G) in zip(rows, buffers, strict=True):
            if fused(self.kernels, x_ND):
                from titanmoe.ops.kernels import put

                put.put_rows(x_ND, to_N, addresses_G, self.limit)
            else:
                plain_put(x_ND, to_N, of_ranks)

    def take(self, buffers: Sequence[Buffers], from_M: Tensor) -> tuple[Tensor, ...]:
        """Copy what has arrived out of this rank's buffers, with zeros in unused slots: the last step of `exchange`.

        Args:
            buffers: the ranks' receive buffers, one for routed tokens and perhaps one for their weights.
            from_M: the place from which each slot of this rank's buffer got its row; -1 for an unused slot.
        """
        arrived = [of_ranks[self.group.rank][: len(from_M)] for of_ranks, _ in buffers]
        if fused(self.kernels, arrived[0]):
            from titanmoe.ops.kernels.put import take_rows as take
        else:
            take = plain_take
        return tuple(take(x_MD, from_M) for x_MD in arrived)

    def check_first_exchange(self, num_experts: int) -> None:
        """Test the buffers: send rows that name their origin to other ranks and back. Collective over the world.

        Each rank sends one row each to half of the experts, as far as the send buffer allows.

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
    buffer may hand it a copy, and then write that copy over what other ranks have sent.

    Args:
        rows: routed tokens (N, D), and perhaps their routing weights (N, 1).
        to_N: the place to which each row goes, rank * limit + slot of that rank's buffer; -1 for nowhere.
        from_M: the place from which each slot of this rank's buffer gets its row; -1 for an unused slot.
        memory: the name of the `SymmetricBuffers`.
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
    """Write rows to their places in the ranks' buffers, and return what arrived. Not differentiable; collective.

    Under a torch dispatch mode, such as one that records messages, it goes through the operation `titanmoe::exchange`,
    which the mode sees.

    Args:
        rows: routed tokens (N, D), and perhaps their routing weights (N, 1).
        to_N: the place to which each row goes, rank * limit + slot of that rank's buffer; -1 for nowhere.
        from_M: the place from which each slot of this rank's buffer gets its row; -1 for an unused slot.
        memory: the name of the `SymmetricBuffers`.
    """
    return (exchange_op if is_in_torch_dispatch_mode() else _exchange)(list(rows), to_N, from_M, memory)


def _exchange(rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor, memory: str) -> list[Tensor]:
    return list(SymmetricBuffers.by_name[memory].exchange(rows, to_N, from_M))


exchange_op = torch.library.custom_op("titanmoe::exchange", _exchange, mutates_args=())
exchange_op.register_effect(_EffectType.ORDERED)  # never merged, removed, moved or recomputed


@exchange_op.register_fake
def _(rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor, memory: str) -> list[Tensor]:
    return [x_ND.new_empty(from_M.shape[0], x_ND.shape[1]) for x_ND in rows]


def _save_places(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _, to_N, from_M, ctx.memory = inputs
    ctx.save_for_backward(to_N, from_M)


def _send_back(ctx: Any, grads: list[Tensor]) -> tuple:
    to_N, from_M = ctx.saved_tensors
    return exchange_op(grads, from_M, to_N, ctx.memory), None, None, None


exchange_op.register_autograd(_send_back, setup_context=_save_places)


class Symmetric(Dispatcher):
    """The dispatcher that writes routed tokens into the memory of their experts' ranks.

    It does so during a training step; elsewhere, where an overflow could not be repeated, it works as AllToAll.
    """

    memory: SymmetricBuffers | None

    @staticmethod
    def missing(device: str) -> str:
        return missing(device)

    @staticmethod
    def reserve(
        model: Model, options: MoEOptions, ranks: ExpertRanks, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> SymmetricBuffers:
        return SymmetricBuffers(model, options, ranks, tokens, dtype, device)

    def place(self, ranks: ExpertRanks) -> None:
        super().place(ranks)
        self.plain = AllToAll(self.num_experts, self.kernels)
        self.plain.allows_unused_slots = True
        self.plain.place(ranks)

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, slots_per_expert: int) -> Exchange:
        """Write routed tokens into the receive buffers of their experts' ranks, without a host sync.

        Collective over the dispatch group. The experts get the full receive buffer, in which unused slots are zero;
        their outputs for these may be anything. If the routed tokens for any rank do not fit, nothing is sent, and that
        rank sets `needs_repeat`.
        """
        memory = self.memory
        if memory is None or self.group == NO_GROUP:
            return self.plain.dispatch(x_TD, weights_TK, chosen_TK, slots_per_expert)
        rows = chosen_TK.numel() * self.etp
        choice_S, slot, count_E = assign_unpadded_slots(chosen_TK, self.num_experts, self.ep, self.etp, self.kernels)
        to_S, from_R, slots_e, fits, _ = self.gather_places(count_E, memory, rows)
        # If not, no row is sent and no token has one, so that everything stays finite until the flag is read.
        x_SD, weights_S1, route = fill_slots(x_TD, weights_TK, choice_S, slot.where(fits, rows), self.kernels)
        x_RD, weights_R1 = exchange((x_SD, weights_S1), to_S, from_R, memory.name)
        return SymmetricExchange(x_RD, weights_R1, slots_e, memory.name, to_S, from_R, route, self.kernels)

    def gather_places(self, count_E: Tensor, memory: SymmetricBuffers, rows: int) -> Places:
        """Gather all ranks' counts of routed tokens, and compute where each routed token goes to and comes from.

        Collective over the dispatch group. Sets `needs_repeat` if the routed tokens for this rank do not fit into its
        receive buffer.

        Args:
            count_E: the number of this rank's choices of each expert.
            memory: the buffers.
            rows: the slots of this rank's send buffer.
        """
        count_GE = all_gather(count_E, 0, self.group).view(-1, self.num_experts)
        out = places(count_GE, self.ranks, memory.limit, rows, memory.receive_slots)
        memory.needs_repeat.logical_or_(out.overflows)
        return out


class SymmetricExchange(NamedTuple):
    """The received routed tokens of this rank's experts, and the places to which the experts' outputs go back."""

    x_RD: Tensor
    weights_R1: Tensor
    slots_e: Tensor
    memory: str
    to_S: Tensor
    from_R: Tensor
    route: Route
    kernels: str

    def receive_routed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the routed tokens of this rank's experts, which have arrived, with unused slots.

        Returns:
            The slots of the receive buffer (R, D), sorted by expert; their routing weights (R, 1); and the number of
            each expert's slots (e,), its unused ones included.
        """
        return self.x_RD, self.weights_R1, self.slots_e

    @named("combine")
    def combine(self, y_RD: Tensor) -> Tensor:
        """Write the experts' outputs back to their tokens' ranks, and return each token's sum of them (T, D)."""
        (y_SD,) = exchange((y_RD,), self.from_R, self.to_S, self.memory)
        return unpermute_tokens(y_SD, self.route.source_S, self.route.slot_TJ, self.kernels)
