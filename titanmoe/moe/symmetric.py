"""Rows to their experts through symmetric memory: sizes stay on the device, so the host never waits for them.

`torch.ops.symm_mem.all_to_all_vdev_2d` carries rows laid out by rank and expert into a buffer laid out by expert and
sender, and `all_to_all_vdev_2d_offset` carries them back; each is the other's backward. Both read their sizes on the
device. The receive buffer is as large as an over-subscription factor says, and the ops do not look where it ends. So
the ranks of a group first add up their counts, and if one of them would receive more than it can hold, nobody sends
anything and a flag is raised: the step is then made again by AllToAll (`Trainer.forward_backward`).

Shapes as in titanmoe.moe.dispatch, and: H rows laid out at home, T * K * etp, the unused ones last; A rows of the
receive buffer, every expert's bin a multiple of ALIGN rows, what is between and after the experts' rows unused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.collectives import Group, all_reduce
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.moe.dispatch import Dispatcher, Route, copy_rows, lay_out, sort_by_expert
from titanmoe.moe.permute import to_tokens

if TYPE_CHECKING:
    from titanmoe.moe.layer import MoE

ALIGN = 8  # rows: 16 bytes of bfloat16, as the grouped product wants where it adds up over an expert's rows
OPS = ("symm_mem::all_to_all_vdev_2d", "symm_mem::all_to_all_vdev_2d_offset")


def missing(device: str) -> str:
    """What this machine lacks to send rows through symmetric memory; "" if nothing. device: as in training.device."""
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


class Lane(NamedTuple):
    """Symmetric buffers for rows of one width, (H, .) and (A, .), two of each."""

    home: tuple[Tensor, Tensor]
    away: tuple[Tensor, Tensor]


class Symmetric(Dispatcher):
    """For all layers of a rank. Made by all ranks of the world together, with equal sizes, as allocation demands."""

    def __init__(self, config: Config, fold: Fold, group: Group, device: torch.device):
        super().__init__(config.model.num_experts, kernels=config.moe.kernels)
        self.set_groups(group, fold.ep, fold.etp)
        tokens = config.training.local_batch_size * config.training.seq_len // (fold.cp * fold.tp)
        top_k, held = config.model.top_k, self.local_experts
        self.home_rows = tokens * top_k * fold.etp  # also what arrives if routing is even
        most = group.size * tokens * min(top_k, held)
        wanted = min(math.ceil(config.moe.symm_mem_factor * self.home_rows), most)
        self.away_rows = wanted + -wanted % ALIGN + held * ALIGN
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)
        self.turn = 0
        if group.size == 1:
            return
        if device.type == "cuda" and symm_mem.get_backend(device) != "NVSHMEM":
            symm_mem.set_backend("NVSHMEM")

        def symmetric(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            buffer = symm_mem.empty(*shape, dtype=dtype, device=device)
            symm_mem.rendezvous(buffer, group.name)
            return buffer

        def lane(width: int, dtype: torch.dtype) -> Lane:
            home, away = (
                tuple(symmetric(rows, width, dtype=dtype) for _ in range(2))
                for rows in (self.home_rows, self.away_rows)
            )
            return Lane(home, away)

        compute = getattr(torch, config.training.mixed_precision_param)
        self.rows = lane(config.model.dim, compute)
        self.weights = lane(1, torch.promote_types(compute, getattr(torch, config.moe.router_dtype)))
        pieces = group.size * held
        self.send = symmetric(pieces)
        self.give = symmetric(2, pieces)
        self.take = symmetric(2, pieces), symmetric(2, pieces)

    @contextmanager
    def serving(self, layers: Collection[MoE]) -> Iterator[None]:
        """In place of the layers' own dispatchers, the exact ones. `overflowed` tells afterwards what came of it."""
        exact = [moe.dispatcher for moe in layers]
        self.overflowed.zero_()
        try:
            for moe in layers:
                moe.dispatcher = self
            yield
        finally:
            for moe, dispatcher in zip(layers, exact, strict=True):
                moe.dispatcher = dispatcher

    def dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, bin: int
    ) -> tuple[Tensor, Tensor, Tensor, Route]:
        """Rows after the last expert's are zero here, and may be anything in what the experts make of them."""
        order, count_E = sort_by_expert(chosen_TK, self.num_experts)
        rows = chosen_TK.numel() * self.etp
        entry_H, slot = lay_out(chosen_TK, order, count_E, self.ep, self.etp, 0, rows)
        if self.group.size == 1:
            x_HD, weights_H1, home = copy_rows(x_TD, weights_TK, entry_H, slot, self.kernels)
            return x_HD, weights_H1, count_E, home
        total_Pe = all_reduce(count_E, self.group).view(self.ep, -1)
        need_P, mine = bins(total_Pe).sum(1), self.group.rank // self.etp
        fits = (need_P <= self.away_rows).all()
        self.overflowed.logical_or_(need_P[mine] > self.away_rows)
        # If not, no row is sent and no token has one, so that everything up to the flag's reading is finite.
        x_HD, weights_H1, home = copy_rows(x_TD, weights_TK, entry_H, slot.where(fits, rows), self.kernels)
        send_Ge = (count_E * fits).view(self.ep, 1, -1).expand(-1, self.etp, -1).flatten()
        total_e = total_Pe[mine] * fits
        used_A1 = used(total_e, self.away_rows).unsqueeze(1)
        x_AD, back = _There.apply(x_HD, self, self.rows, send_Ge, used_A1)
        weights_A1, _ = _There.apply(weights_H1, self, self.weights, send_Ge, used_A1)
        return x_AD, weights_A1, bins(total_e), home._replace(back=(send_Ge, back, used_A1))

    def combine(self, y_AD: Tensor, route: Route) -> Tensor:
        if route.back is not None:
            y_AD = _Back.apply(y_AD, self, self.rows, route.source_R.shape[0], *route.back)
        return to_tokens(y_AD, route.source_R, route.slot_TJ, self.kernels)

    # When an operation has ended here, a peer may still read what it sent, or have begun the next one, which writes
    # sizes to `take` of this rank. But nobody gets further in an operation than its sizes before all have ended the one
    # before. So what peers read and write takes turns, and what they wrote is copied at once.

    def there(self, lane: Lane, x_HD: Tensor, send_Ge: Tensor) -> tuple[Tensor, Tensor]:
        """The receive buffer, to be copied before the next operation, and the sizes and places of its pieces."""
        self.turn ^= 1
        home, away, take = lane.home[self.turn], lane.away[self.turn], self.take[self.turn]
        home[: x_HD.shape[0]].copy_(x_HD)
        self.send.copy_(send_Ge)
        torch.ops.symm_mem.all_to_all_vdev_2d(home, away, self.send, take, self.group.name, ALIGN)
        return away, take.clone()

    def back(self, lane: Lane, y_AD: Tensor, back: Tensor) -> Tensor:
        self.turn ^= 1
        home, away, take = lane.home[self.turn], lane.away[self.turn], self.take[self.turn]
        away.copy_(y_AD)
        self.give.copy_(back)
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(away, home, self.give, take, self.group.name)
        return home


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_HD, wire, lane, send_Ge, used_A1):
        ctx.wire, ctx.lane, ctx.rows = wire, lane, x_HD.shape[0]
        x_AD, back = wire.there(lane, x_HD, send_Ge)
        ctx.save_for_backward(back)
        ctx.mark_non_differentiable(back)
        return x_AD.where(used_A1, 0), back

    @staticmethod
    def backward(ctx, grad_AD, _):
        (back,) = ctx.saved_tensors
        return ctx.wire.back(ctx.lane, grad_AD, back)[: ctx.rows].clone(), None, None, None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_AD, wire, lane, rows, send_Ge, back, used_A1):
        ctx.wire, ctx.lane = wire, lane
        ctx.save_for_backward(send_Ge, used_A1)
        return wire.back(lane, y_AD, back)[:rows].clone()

    @staticmethod
    def backward(ctx, grad_HD):
        send_Ge, used_A1 = ctx.saved_tensors
        grad_AD, _ = ctx.wire.there(ctx.lane, grad_HD, send_Ge)
        return grad_AD.where(used_A1, 0), None, None, None, None, None, None


def bins(total_e: Tensor) -> Tensor:
    """Rows of each expert's bin: whole multiples of ALIGN, and never none."""
    return ((total_e + ALIGN - 1) // ALIGN * ALIGN).clamp(min=ALIGN)


def used(total_e: Tensor, rows: int) -> Tensor:
    """Which rows of the receive buffer hold one: the first of each bin."""
    bin_e = bins(total_e)
    end_e, row_A = bin_e.cumsum(0), torch.arange(rows, device=total_e.device)
    expert_A = torch.searchsorted(end_e, row_A, right=True)  # past the last bin: e
    return row_A - F.pad(end_e - bin_e, (0, 1))[expert_A] < F.pad(total_e, (0, 1))[expert_A]
