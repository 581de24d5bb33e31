"""Which way on this device? GPUs want kernels and few launches, CPUs what stays in their caches. Nobody else decides.

What only calls torch.cuda, and so needs a GPU at hand, asks the tensor's own device. A rehearsal runs on fake CPU
tensors and goes the ways of hardware that is not there: `as_on`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["cpu", "cuda"]


class Hardware(NamedTuple):
    kind: Kind
    capability: tuple[int, int] = (0, 0)
    """CUDA's number for the generation: 9.0 is Hopper."""


_instead: Hardware | None = None
"""What CPU tensors stand for while a rehearsal runs: kernels deep inside autograd know of no caller to tell them."""


@contextmanager
def as_on(hardware: Hardware) -> Iterator[None]:
    """Take the ways of this hardware, wherever tensors lie."""
    global _instead
    before, _instead = _instead, hardware
    try:
        yield
    finally:
        _instead = before


def kind(where: Tensor | torch.device | str) -> str:
    """ "cuda" for the ways of GPUs, "cpu" for those of CPUs; "meta" goes the ways of GPUs that need no kernel."""
    own = where if isinstance(where, str) else where.type if isinstance(where, torch.device) else where.device.type
    return _instead.kind if _instead is not None and own == "cpu" else own


def capability(device: torch.device | None = None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if _instead is None else _instead.capability


def chosen(asked: str) -> Kind:
    """What `[training] device` comes to on this machine."""
    if asked == "cpu":
        return "cpu"
    if _instead is not None:
        return _instead.kind
    return "cuda" if torch.cuda.is_available() else "cpu"
