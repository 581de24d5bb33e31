"""Sends rows to their experts through symmetric memory. Sizes stay on the device, so the host never waits for them.

`torch.ops.symm_mem.all_to_all_vdev_2d` sends rows sorted by rank and expert into a buffer sorted by expert and sender,
and `all_to_all_vdev_2d_offset` sends them back; each is the other's backward. Both read their sizes on the device. An
over-subscription factor sets the size of the receive buffer, and the ops do not check where it ends. So the ranks of a
group first sum their counts, and if any of them would receive more than fits, no rank sends anything and a flag is set:
the step is then repeated without the buffers, which is exact (`Gradients.sums`).

Shapes as in titanmoe.moe.dispatchers.protocol, and: H rows of the send buffer, T * K * etp, the unused ones last; A
rows of the receive buffer: every expert's bin is a multiple of ALIGN rows, those after its own rows and after all bins
unused.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.collectives import InFlight, all_reduce
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.moe.assign import assign_all_rows, copy_rows
from titanmoe.moe.dispatchers.alltoall import AllToAll, AllToAllChunk, AllToAllExchange
from titanmoe.moe.dispatchers.protocol import Dispatcher, ExpertRanks, SharedBuffers
from titanmoe.observe import named
from titanmoe.ops import device as devices

ALIGN = 8  # rows: 16 bytes of bfloat16, which the grouped product needs where it sums over an expert's rows
OPS = ("symm_mem::all_to_all_vdev_2d", "symm_mem::all_to_all_vdev_2d_offset")


def missing(device: str) -> str:
    """Why this machine cannot send rows through symmetric memory; "" if it can. device: as in training.device."""
    if devices.pretended() and devices.kind_for(device) == "cuda":
        return ""  # we cannot know what that machine has
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU"
    for op in OPS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op, device.upper()):
            return f"PyTorch {torch.__version__} has no {op} on {device}"
    if device == "cuda" and not symm_mem.is_nvshmem_available():
        return f"PyTorch {torch.__version__} finds no NVSHMEM (libnvshmem_host.so.3, of the package nvidia-nvshmem)"
    return ""


class Buffers(NamedTuple):
    """Send and receive buffers, (H, .) and (A, .), for rows of one width; two of each."""

    home: tuple[Tensor, Tensor]
    away: tuple[Tensor, Tensor]


class SymmetricBuffers(SharedBuffers):
    """The buffers of all layers of a rank. Allocating them is collective: all ranks of the world do it together, with
    equal sizes.
    """

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
        self.group = group = ranks.group
        local_experts = model.num_experts // ranks.ep
        self.home_rows = tokens * model.top_k * ranks.etp  # with even routing, as many arrive
        most = group.size * tokens * min(model.top_k, local_experts)
        room = min(math.ceil(options.symm_mem_factor * self.home_rows), most)
        self.away_rows = room + -room % ALIGN + local_experts * ALIGN
        self.turn = 0
        if group.size == 1:
            return
        if device.type == "cuda" and symm_mem.get_backend(device) != "NVSHMEM":
            symm_mem.set_backend("NVSHMEM")

        def symmetric(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            buffer = symm_mem.empty(*shape, dtype=dtype, device=device)
            symm_mem.rendezvous(buffer, group.name)
            return buffer

        def buffers(width: int, dtype: torch.dtype) -> Buffers:
            home, away = (
                tuple(symmetric(rows, width, dtype=dtype) for _ in range(2))
                for rows in (self.home_rows, self.away_rows)
            )
            return Buffers(home, away)

        self.rows = buffers(model.dim, dtype)
        self.weights = buffers(1, torch.promote_types(dtype, getattr(torch, options.router_dtype)))
        pieces = group.size * local_experts
        self.send = symmetric(pieces)
        self.give = symmetric(2, pieces)
        self.take = symmetric(2, pieces), symmetric(2, pieces)
        self.try_once(local_experts)

    def try_once(self, local_experts: int) -> None:
        """Sends one row to each expert of each rank and back, as far as there is room, and checks what arrives. A row
        names its sender and its expert.

        All ranks of the world call this together: a group's first exchange divides up NVSHMEM's world.
        """
        buffers, size, rank = self.rows, self.group.size, self.group.rank
        device, dtype = buffers.home[0].device, buffers.home[0].dtype
        width, rows = buffers.home[0].shape[1], min(self.home_rows, size * local_experts)
        piece_P = torch.arange(size * local_experts, device=device)

        def row(sender: Tensor, piece: Tensor) -> Tensor:
            return torch.stack((sender, piece), 1).to(dtype).repeat(1, width // 2)

        own = row(torch.full((rows,), rank, device=device), piece_P[:rows])
        x_HD = F.pad(own, (0, width % 2))
        away, back = self.dispatch(buffers, x_HD, (piece_P < rows).to(torch.int64))
        arrival = away.clone()
        home = self.combine(buffers, arrival, back)[:rows].clone()
        names, places = [], []
        for expert in range(local_experts):  # of this rank: its bin has the senders' rows in order
            piece = rank * local_experts + expert
            if piece < rows:
                places += [expert * ALIGN + sender for sender in range(size)]
                names += [(sender, piece) for sender in range(size)]
        expected = row(*torch.tensor(names, device=device).view(-1, 2).unbind(1))
        right = torch.equal(home, x_HD) and torch.equal(arrival[places, : width // 2 * 2], expected)
        wrong = torch.tensor([float(not right)], device=device)
        torch.distributed.all_reduce(wrong)
        if wrong:
            raise ConfigError(
                [
                    f'moe.dispatcher = "symm_mem": rows of a first exchange came out wrong on {int(wrong)} of '
                    f"{torch.distributed.get_world_size()} ranks (PyTorch {torch.__version__}): use dispatcher = "
                    '"alltoall"'
                ]
            )

    # When an operation has ended here, a peer may still be reading what it sent, or have started the next one, which
    # writes sizes to this rank's `take`. But no rank gets past the sizes of an operation before all have finished the
    # previous one. So two of each buffer that peers read or write, used in turn, are enough, if what arrives is copied
    # at once.

    def dispatch(self, buffers: Buffers, x_HD: Tensor, send_Ge: Tensor) -> tuple[Tensor, Tensor]:
        """The receive buffer, to be copied before the next operation, and where the rows of each sender and expert
        lie."""
        self.turn ^= 1
        home, away, take = buffers.home[self.turn], buffers.away[self.turn], self.take[self.turn]
        home[: x_HD.shape[0]].copy_(x_HD)
        self.send.copy_(send_Ge)
        torch.ops.symm_mem.all_to_all_vdev_2d(home, away, self.send, take, self.group.name, ALIGN)
        return away, take.clone()

    def combine(self, buffers: Buffers, y_AD: Tensor, back: Tensor) -> Tensor:
        self.turn ^= 1
        home, away, take = buffers.home[self.turn], buffers.away[self.turn], self.take[self.turn]
        away.copy_(y_AD)
        self.give.copy_(back)
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(away, home, self.give, take, self.group.name)
        return home


class Symmetric(Dispatcher):
    """Uses symmetric memory during a training step; elsewhere, where no overflow could be repeated, it is AllToAll."""

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
        self.plain = AllToAll(self.num_experts, self.chunks, self.kernels)
        self.plain.place(ranks)

    @named("dispatch")
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin_rows: int) -> AllToAllExchange:
        """Unused rows are zero in what experts get, and may be anything in their output."""
        memory = self.memory
        if memory is None:
            return self.plain.dispatch(x_TD, weights_TK, chosen_TK, bin_rows)
        rows = chosen_TK.numel() * self.etp
        entry_H, slot, count_E = assign_all_rows(chosen_TK, self.num_experts, self.ep, self.etp, self.kernels)
        if self.group.size == 1:
            x_HD, weights_H1, route = copy_rows(x_TD, weights_TK, entry_H, slot, self.kernels)
            flights = InFlight(x_HD, None), InFlight(weights_H1, None)
            chunk = AllToAllChunk(*flights, count_E, None, None, None, self.group, self.kernels)
            return AllToAllExchange([chunk], route, self.kernels)
        total_Pe = all_reduce(count_E, self.group).view(self.ep, -1)
        need_P, expert_rank = bins(total_Pe).sum(1), self.group.rank // self.etp
        fits = (need_P <= memory.away_rows).all()
        memory.overflowed.logical_or_(need_P[expert_rank] > memory.away_rows)
        # If not, no row is sent and no token has one, so that everything stays finite until the flag is read.
        x_HD, weights_H1, route = copy_rows(x_TD, weights_TK, entry_H, slot.where(fits, rows), self.kernels)
        send_Ge = (count_E * fits).view(self.ep, 1, -1).expand(-1, self.etp, -1).flatten()
        total_e = total_Pe[expert_rank] * fits
        used_A1 = used(total_e, memory.away_rows).unsqueeze(1)
        x_AD, back = _Dispatch.apply(x_HD, memory, memory.rows, send_Ge, used_A1)
        weights_A1, _ = _Dispatch.apply(weights_H1, memory, memory.weights, send_Ge, used_A1)
        chunk = SymmetricChunk(x_AD, weights_A1, bins(total_e), memory, rows, send_Ge, back, used_A1)
        return AllToAllExchange([chunk], route, self.kernels)


class SymmetricChunk(NamedTuple):
    x_AD: Tensor
    weights_A1: Tensor
    count_e: Tensor
    memory: SymmetricBuffers
    send_rows: int
    """How many rows the send buffer has."""
    send_Ge: Tensor
    back: Tensor
    """Sizes and places, in the receive buffer, of the rows from each sender for each expert."""
    used_A1: Tensor

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x_AD, self.weights_A1, self.count_e

    @named("combine")
    def send_back(self, y_AD: Tensor) -> InFlight:
        how = self.memory, self.memory.rows, self.send_rows, self.send_Ge, self.back, self.used_A1
        return InFlight(_Combine.apply(y_AD, *how), None)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_HD, memory, buffers, send_Ge, used_A1):
        ctx.memory, ctx.buffers, ctx.rows = memory, buffers, x_HD.shape[0]
        x_AD, back = memory.dispatch(buffers, x_HD, send_Ge)
        ctx.save_for_backward(back)
        ctx.mark_non_differentiable(back)
        return x_AD.where(used_A1, 0), back

    @staticmethod
    def backward(ctx, grad_AD, _):
        (back,) = ctx.saved_tensors
        return ctx.memory.combine(ctx.buffers, grad_AD, back)[: ctx.rows].clone(), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_AD, memory, buffers, rows, send_Ge, back, used_A1):
        ctx.memory, ctx.buffers = memory, buffers
        ctx.save_for_backward(send_Ge, used_A1)
        return memory.combine(buffers, y_AD, back)[:rows].clone()

    @staticmethod
    def backward(ctx, grad_HD):
        send_Ge, used_A1 = ctx.saved_tensors
        grad_AD, _ = ctx.memory.dispatch(ctx.buffers, grad_HD, send_Ge)
        return grad_AD.where(used_A1, 0), None, None, None, None, None, None


def bins(total_e: Tensor) -> Tensor:
    """Rows of each expert's bin: a multiple of ALIGN, at least one."""
    return ((total_e + ALIGN - 1) // ALIGN * ALIGN).clamp(min=ALIGN)


def used(total_e: Tensor, rows: int) -> Tensor:
    """Which rows of the receive buffer are in use: the first of each bin."""
    bin_e = bins(total_e)
    end_e, row_A = bin_e.cumsum(0), torch.arange(rows, device=total_e.device)
    expert_A = torch.searchsorted(end_e, row_A, right=True)  # past the last bin: e
    return row_A - F.pad(end_e - bin_e, (0, 1))[expert_A] < F.pad(total_e, (0, 1))[expert_A]
