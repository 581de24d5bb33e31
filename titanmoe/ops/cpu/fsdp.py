"""Collectives of FSDP2 on CPUs, over gloo: without extra copies, and with waits that are announced and time out.

`use_gloo_collectives` sets them on an FSDP unit. Observers (titanmoe.observe) are told of every wait.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanmoe import observe

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch's reduce-scatter of one tensor, which torch 2.13 renames."""


class _Exchange(dist.Work):
    """The handle of an all-gather in flight, started on creation: every two ranks of a group exchange their shards.

    `full` receives the shards of all other ranks, each at its place.
    """

    def __init__(self, full: Tensor, shard: Tensor, group: dist.ProcessGroup):
        super().__init__()
        ranks, rank = group.size(), group.rank()
        self.group, shards = group, full.chunk(ranks)
        self.works: list[tuple[dist.Work, str, int]] = []
        for step in range(1, ranks):
            before, after = (rank - step) % ranks, (rank + step) % ranks
            self.works.append((dist.irecv(shards[before], group=group, group_src=before), "send", before))
            self.works.append((dist.isend(shard, group=group, group_dst=after), "take", after))

    def wait(self, timeout: Any = None) -> bool:
        """Wait until all messages have arrived, at most for the group's current timeout, and return True.

        gloo by itself would use the timeout of the group's creation. `timeout` is not used.

        Raises:
            TimeoutError: names the rank that did not send or take its shard in time.
            RuntimeError: gloo's, if the exchange fails earlier.
        """
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
                    f"rank {dist.get_rank()} waited {bound:g} s in FSDP's all-gather of weights for rank {rank} to "
                    f"{does} its shard: see what rank {rank} prints or hangs in; if it is only slow, raise "
                    "training.timeout_s (training.first_step_timeout_s for the first step)"
                ) from error
        observe.arrived()
        return True


class DirectAllGather:
    """FSDP2's all-gather on CPUs, which receives each rank's shard directly at its place in the full weight.

    FSDP has put this rank's own shard there before. gloo's all-gather copies through a second buffer, which takes twice
    the CPU time. FSDP waits when it needs the weights.
    """

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of `size`, into which FSDP2, which calls this, gathers weights."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Start to gather each rank's input_tensor into output_tensor, and return the handle to wait on.

        Called by FSDP2; collective over the group. The call never waits; `async_op` is not used.
        """
        return _Exchange(output_tensor, input_tensor, group)


class ReduceScatter:
    """FSDP2's reduce-scatter on CPUs: gloo's, with the wait announced to observers.

    If there are replicas, torch all-reduces over them right after this and then calls FSDP's all-reduce hook. The wait
    for replicas is announced here too, and ends in the hook `announce_replicas_summed`.
    """

    def __init__(self, ranks: int, replicas: str = ""):
        """Store the group sizes and names.

        Args:
            ranks: the number of ranks that share the weights.
            replicas: the name of the process group of replicas; "" if there are none. With replicas, FSDP's all-reduce
                hook has to be `announce_replicas_summed`.
        """
        self.ranks, self.replicas = ranks, replicas
        self._message_numbers = 0

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of `size` for gradients. Called by FSDP2.

        FSDP2 calls it alternately for the gradients to send and for this rank's shard of the sum, told apart by the
        factor `ranks` in size. With one rank the latter announces the wait for replicas: no `__call__` follows.
        """
        numbers = math.prod(size)
        is_sum = numbers * self.ranks == self._message_numbers
        self._message_numbers = 0 if is_sum else numbers
        if is_sum and self.ranks == 1:  # torch copies instead of calling us
            self._announce_wait_for_replicas()
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce input_tensor over the ranks by `op`, and write this rank's shard of the result to output_tensor.

        Called by FSDP2; collective over the group. Waits until the shard has been written. `async_op` is not used.
        """
        observe.waits(group.group_name)
        REDUCE_SCATTER(output_tensor, input_tensor, op, group)
        observe.arrived()
        self._announce_wait_for_replicas()

    def _announce_wait_for_replicas(self) -> None:
        if self.replicas:
            observe.waits(self.replicas)


def announce_replicas_summed(summed: Tensor) -> None:
    """Tell observers that the wait for the all-reduce over replicas has ended. For `set_all_reduce_hook` of FSDP."""
    observe.arrived()


def use_gloo_collectives(unit: FSDPModule, mesh: DeviceMesh) -> None:
    """Let an FSDP unit use `DirectAllGather` and `ReduceScatter`, on CPUs.

    Args:
        unit: the module that `fully_shard` wrapped.
        mesh: the mesh over which it is sharded, whose first dim is that of replicas if it has two.
    """
    unit.set_custom_all_gather(DirectAllGather())
    replicas = mesh.get_group(0).group_name if mesh.ndim > 1 else ""
    unit.set_custom_reduce_scatter(ReduceScatter(mesh.size(mesh.ndim - 1), replicas))
    if replicas:
        unit.set_all_reduce_hook(announce_replicas_summed)
