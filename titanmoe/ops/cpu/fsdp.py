"""Collectives of FSDP2 on CPUs: pieces that go straight to their place, and waits that are announced and end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanmoe import observe

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renames it."""


class _Exchange(dist.Work):
    """One message between every two ranks of a group: `outgoing` by destination rank, `incoming` by source rank."""

    def __init__(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup, what: str, tag: int
    ):
        super().__init__()
        ranks, rank = group.size(), group.rank()
        self.group, self.what = group, what
        self.works: list[tuple[dist.Work, str, int]] = []
        for step in range(1, ranks):
            before, after = (rank - step) % ranks, (rank + step) % ranks
            self.works.append((dist.irecv(incoming[before], group=group, group_src=before, tag=tag), "send", before))
            self.works.append((dist.isend(outgoing[after], group=group, group_dst=after, tag=tag), "take", after))

    def wait(self, timeout: Any = None) -> bool:
        """All together within the group's current time-out: by itself gloo uses that of the group's creation."""
        observe.waits(self.group.group_name)
        bound = self.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        end = time.monotonic() + bound
        for work, does, peer in self.works:
            try:
                # torch cuts to whole milliseconds: with one more it never gives up before `end`, nor waits forever
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0) + 0.001))
            except RuntimeError as error:
                if time.monotonic() < end:
                    raise
                rank = dist.get_global_rank(self.group, peer)
                raise TimeoutError(
                    f"rank {dist.get_rank()} waited {bound:g} s in {self.what} for rank {rank} to {does} its piece: "
                    f"see what rank {rank} prints or hangs in; if it is only slow, raise training.timeout_s "
                    "(training.first_step_timeout_s for the first step)"
                ) from error
        observe.arrived()
        return True


class StraightToPlace:
    """All-gather for FSDP2 on CPUs: each rank's piece goes straight to its place in the whole, where FSDP has already
    put ours.

    gloo's own gathers into a second buffer and copies: twice the CPU time. FSDP waits when it needs the weights.
    """

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        ranks = group.size()
        return _Exchange(
            [input_tensor] * ranks, output_tensor.chunk(ranks), group, "FSDP's all-gather of weights", tag=0
        )


class ReduceScatter:
    """For FSDP2, by gloo as FSDP2 itself would do it, but with its wait announced. So is the one that follows with
    replicas: torch sums over them by itself, right after this, and then calls FSDP's all-reduce hook.
    """

    def __init__(self, ranks: int, replicas: str = ""):
        """replicas: the name of their group. The hook has to be `end_of_replicas`."""
        self.ranks, self.replicas = ranks, replicas
        self._message_numbers = 0

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called alternately for what is sent and for the sum, which is smaller by the number of ranks."""
        numbers = math.prod(size)
        is_sum = numbers * self.ranks == self._message_numbers
        self._message_numbers = 0 if is_sum else numbers
        if is_sum and self.ranks == 1:  # torch copies instead of calling us
            self._wait_for_replicas()
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        observe.waits(group.group_name)
        REDUCE_SCATTER(output_tensor, input_tensor, op, group)
        observe.arrived()
        self._wait_for_replicas()

    def _wait_for_replicas(self) -> None:
        if self.replicas:
            observe.waits(self.replicas)


def end_of_replicas(summed: Tensor) -> None:
    observe.arrived()


def send_over_gloo(unit: FSDPModule, mesh: DeviceMesh) -> None:
    """Have an FSDP unit send as CPUs do.

    mesh: the ranks that share its weights, after its replicas if there are any.
    """
    unit.set_custom_all_gather(StraightToPlace())
    replicas = mesh.get_group(0).group_name if mesh.ndim > 1 else ""
    unit.set_custom_reduce_scatter(ReduceScatter(mesh.size(mesh.ndim - 1), replicas))
    if replicas:
        unit.set_all_reduce_hook(end_of_replicas)
