"""Numbers that the host waits for, such as how many routed tokens go where.

They are read once, also where backward recomputes a region (titanmoe.comm.recomputation). Dispatchers send counts with
it, and copy tokens into their slots before the counts arrive:

    counts = CountExchange(send_Ge, group, on_gpu)          starts to send the counts
    receive_Ge, send, receive = counts.read()               the host waits

Shapes: G ranks of the group, e experts of a rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from titanmoe.comm import interleave
from titanmoe.comm.collectives import Group, launch_all_to_all, wait
from titanmoe.comm.recomputation import cached


class HostCopy:
    """A copy of a tensor from the device to the host that may still be under way.

    Work that is launched between its creation and `read` runs on the device while the host waits.
    """

    def __init__(self, x: Tensor):
        self.numbers, self.event = cached(partial(_copy, x))

    def tensor(self) -> Tensor:
        """Wait until the copy has finished, and return it: a tensor on the host. Of an x on the host it is x itself.

        While backward recomputes a checkpointed region, it is forward's copy.
        """
        if self.event is not None:
            self.event.synchronize()
        return self.numbers

    def read(self) -> Any:
        """Wait until the copy has finished, and return it as `Tensor.tolist` does: a Python number or nested lists.

        While backward recomputes a checkpointed region, the numbers that forward read are returned without a wait.
        """
        return cached(lambda: self.tensor().tolist())


def _copy(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if torch.compiler.is_compiling():
        # one copy: `tolist` of a tensor on the GPU would be traced as one for each number
        return x.to("cpu"), None
    numbers, event = x.to("cpu", non_blocking=True), None
    if x.is_cuda:
        event = torch.cuda.Event()
        event.record()
    return numbers, event


class CountExchange:
    """The all-to-all in which the ranks of a dispatch group tell each other how many routed tokens they will send."""

    def __init__(self, send_Ge: Tensor, group: Group, on_gpu: bool):
        """Start to send the counts. Collective over the group; in recomputation nothing is sent.

        Args:
            send_Ge: the number of routed tokens that this rank sends to each expert of each rank.
            group: the dispatch group.
            on_gpu: whether the tensors are on a GPU, where waiting for a message blocks the stream but not the host.
        """
        self.send_Ge, self.group, self.on_gpu = send_Ge, group, on_gpu
        each = [1] * group.size
        self.in_flight = cached(lambda: launch_all_to_all(send_Ge, each, each, group)) if group.size > 1 else None

    def read(self) -> tuple[Tensor, list[int], list[int]]:
        """Wait for the other ranks' counts. The host blocks until it knows them, also on a GPU.

        While backward recomputes a checkpointed region, what forward read is returned without a wait.

        Returns:
            The number of routed tokens from each rank for each local expert, a tensor (G, e) on `send_Ge`'s device; the
                number that this rank sends to each rank; and the number that it receives from each rank.
        """
        return cached(self._wait)

    def _wait(self) -> tuple[Tensor, list[int], list[int]]:
        # In a pair the other side has a turn first. On a GPU the copy to the host is launched even before that: behind
        # the other side's kernels the host would wait for these too.
        if not self.on_gpu:
            interleave.yield_to_other()
        receive_Ge = self.send_Ge if self.in_flight is None else wait(self.in_flight, self.group)
        numbers = HostCopy(torch.stack((self.send_Ge, receive_Ge)).sum(2))
        if self.on_gpu:
            interleave.yield_to_other()
        return receive_Ge, *numbers.read()
