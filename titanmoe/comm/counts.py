"""How many rows go where: counts that the ranks of a dispatcher send each other, and that the host has to know.

Rows can be laid out before their counts arrive, because that takes only this rank's own choices:

    counts = Counts(send_Ge, group, on_gpu)                 they leave
    ...                                                     rows are copied into the order in which they are sent
    receive_Ge, send, receive = counts.read()               the host waits

Shapes: G ranks of the group, e experts of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe.comm import turns
from titanmoe.comm.collectives import Group, send_rows, wait
from titanmoe.comm.host import ToHost
from titanmoe.comm.recomputation import cached


class Counts:
    def __init__(self, send_Ge: Tensor, group: Group, on_gpu: bool):
        """Send the counts.

        Args:
            send_Ge: how many rows this rank sends to each expert of each rank.
            group: the dispatcher's.
            on_gpu: whether waiting for a message only holds up the stream.
        """
        self.send_Ge, self.group, self.on_gpu = send_Ge, group, on_gpu
        each = [1] * group.size
        self.flying = cached(lambda: send_rows(send_Ge, each, each, group)) if group.size > 1 else None

    def read(self) -> tuple[Tensor, list[int], list[int]]:
        """Return the counts that arrive, and how many rows go to each rank and come from it. The host waits."""
        return cached(self._wait)

    def _wait(self) -> tuple[Tensor, list[int], list[int]]:
        # In a pair the other side has a turn first. On a GPU the copy to the host is launched even before that: behind
        # the other side's kernels the host would wait for these too.
        if not self.on_gpu:
            turns.give_up()
        receive_Ge = self.send_Ge if self.flying is None else wait(self.flying, self.group)
        numbers = ToHost(torch.stack((self.send_Ge, receive_Ge)).sum(2))
        if self.on_gpu:
            turns.give_up()
        return receive_Ge, *numbers.read()
