"""Numbers that the host waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ToHost:
    """Numbers on their way from the device. What is launched between this and `read` runs while the host waits."""

    def __init__(self, x: Tensor):
        self.numbers, self.event = x.to("cpu", non_blocking=True), None
        if x.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def tensor(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.numbers

    def read(self) -> Any:
        return self.tensor().tolist()
