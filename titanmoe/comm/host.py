"""Numbers that the host waits for: once, also where backward recomputes a region (titanmoe.comm.recomputation)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from titanmoe.comm.recomputation import cached


class ToHost:
    """Numbers on their way from the device. What is launched between this and `read` runs while the host waits."""

    def __init__(self, x: Tensor):
        self.numbers, self.event = cached(partial(_copy, x))

    def tensor(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.numbers

    def read(self) -> Any:
        """Return the numbers as Python's. Waits for them."""
        return cached(lambda: self.tensor().tolist())


def read(x: Tensor) -> Any:
    """Return the numbers of x as Python's. Waits for them."""
    return cached(x.tolist)


def _copy(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if (
        torch.compiler.is_compiling()
    ):  # one copy: `tolist` of a tensor on the GPU would be traced as one for each number
        return x.to("cpu"), None
    numbers, event = x.to("cpu", non_blocking=True), None
    if x.is_cuda:
        event = torch.cuda.Event()
        event.record()
    return numbers, event
