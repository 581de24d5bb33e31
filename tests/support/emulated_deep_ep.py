"""Emulation of the package `deep_ep` on CPUs over gloo, as far as titanmoe.experiments.deepep calls it.

Importing this module makes `deep_ep` importable. It asserts what the real kernels assert, but sends any dtype in place
of bfloat16, with weights in the dtype that it promotes to with float32. deep_ep/buffer.py: with G ranks and E / G
experts on each, `get_dispatch_layout` counts the T tokens for each rank and expert. `dispatch` sends a token once to
each rank that it has choices of, with its J choices renumbered from that rank's first expert (-1: another rank's) and
their weights (0 there); N tokens arrive in order of sender and token. With a handle it sends other rows the same way.
`combine` sends rows back and adds up, at home, what the ranks return of a token; so it does with weights.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanmoe.experiments import deepep

calls: list[str] = []
SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert hidden_bytes > 0
        return 1 << 20

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else 1 << 20


class Handle(NamedTuple):
    visits_TG: Tensor
    send: list[int]
    receive: list[int]


class Buffer:
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0):
        assert num_nvl_bytes == 1 << 20 and num_rdma_bytes == (0 if group.size() <= 8 else 1 << 20)
        self.group, self.ranks = group, group.size()
        dist.barrier(group)  # the real one exchanges addresses

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in SIZES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        calls.append("layout")
        with torch._C.DisableTorchFunction():
            assert topk_idx.dtype == torch.int64 and topk_idx.dim() == 2 and topk_idx.is_contiguous()
            assert num_experts % self.ranks == 0 and topk_idx.shape[1] <= 32
            assert int(topk_idx.min()) >= -1 and int(topk_idx.max()) < num_experts
            chosen = torch.nn.functional.one_hot(topk_idx + 1, num_experts + 1).sum(1)[:, 1:]
            assert int(chosen.max()) <= 1
            visits_TG = chosen.view(len(chosen), self.ranks, -1).any(2)
            return visits_TG.sum(0).int(), None, chosen.sum(0).int(), visits_TG, None

    def _exchange(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        came = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(came, x.contiguous(), receive, send, group=self.group)
        return came

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        calls.append("dispatch again" if handle else "dispatch")
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            with torch._C.DisableTorchFunction():
                return self._rows(x, handle), None, None, None, None, None
        num_tokens_per_rank.tolist()  # the real one waits for counts on the host
        with torch._C.DisableTorchFunction():
            send = num_tokens_per_rank.tolist()
            receive = self._exchange(num_tokens_per_rank, [1] * self.ranks, [1] * self.ranks).tolist()
            handle = Handle(is_token_in_rank, send, receive)
            assert topk_weights.dtype == torch.promote_types(x.dtype, torch.float32) and topk_weights.is_contiguous()
            assert topk_weights.shape == topk_idx.shape == (len(x), topk_idx.shape[1])
            local = len(num_tokens_per_expert) // self.ranks
            first = dist.get_rank(self.group) * local
            chosen_NJ = self._rows(topk_idx, handle) - first
            here = (chosen_NJ >= 0) & (chosen_NJ < local)
            weights_NJ = self._rows(topk_weights, handle).where(here, 0)
            chosen_NJ = chosen_NJ.where(here, -1)
            assert here.any(1).all()
            counts = [int((chosen_NJ == expert).sum()) for expert in range(local)]
            return self._rows(x, handle), chosen_NJ, weights_NJ, counts, handle, None

    def _rows(self, x: Tensor, handle: Handle) -> Tensor:
        assert x.dim() == 2 and x.is_contiguous() and len(x) == len(handle.visits_TG)
        sent = torch.cat([x[handle.visits_TG[:, rank]] for rank in range(self.ranks)])
        return self._exchange(sent, handle.send, handle.receive)

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        calls.append("combine")
        with torch._C.DisableTorchFunction():
            return self._home(x, handle), None if topk_weights is None else self._home(topk_weights, handle), None

    def _home(self, x: Tensor, handle: Handle) -> Tensor:
        assert x.dim() == 2 and x.is_contiguous() and len(x) == sum(handle.receive)
        came = self._exchange(x, handle.receive, handle.send).split(handle.send)
        out = torch.zeros(len(handle.visits_TG), x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        for rank, rows in enumerate(came):
            out[handle.visits_TG[:, rank]] += rows
        return out.to(x.dtype)


module = ModuleType("deep_ep")
module.Buffer = Buffer
sys.modules["deep_ep"] = module
deepep.NEEDS = "cpu"
