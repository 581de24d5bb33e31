"""Which code runs on which device: GPUs need kernels and few launches, CPUs data that stays in their caches.

Only this module decides. What serves CPUs alone is in `titanmoe.ops.cpu`, and `way` says where it is taken. Code that
merely calls torch.cuda, and so needs a real GPU, looks at the tensor's own device. A rehearsal runs on fake CPU tensors
but takes the code of hardware that is not there: `as_on`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

Kind = Literal["cpu", "cuda"]
Way = TypeVar("Way")


class Hardware(NamedTuple):
    kind: Kind
    capability: tuple[int, int] = (0, 0)
    """CUDA's number for the GPU generation: (9, 0) is Hopper."""


HARDWARE = {
    "a100": Hardware("cuda", (8, 0)),
    "h100": Hardware("cuda", (9, 0)),
    "h200": Hardware("cuda", (9, 0)),
    "b200": Hardware("cuda", (10, 0)),
    "cpu": Hardware("cpu"),
}
"""The hardware that a rehearsal can imitate, by name."""

_instead: Hardware | None = None
"""The hardware that CPU tensors represent during a rehearsal. A global, because code deep inside autograd has no caller
that could pass it on.
"""


@contextmanager
def as_on(hardware: Hardware) -> Iterator[None]:
    """Run the code for this hardware, although the tensors are on the CPU."""
    global _instead
    before, _instead = _instead, hardware
    try:
        yield
    finally:
        _instead = before


def pretended() -> bool:
    """Whether a rehearsal runs the code for other hardware."""
    return _instead is not None


def kind(where: Tensor | torch.device | str) -> str:
    """ "cuda" or "cpu" by the code to run; "meta" takes the code of GPUs where that needs no kernel."""
    own_kind = where if isinstance(where, str) else where.type if isinstance(where, torch.device) else where.device.type
    return _instead.kind if _instead is not None and own_kind == "cpu" else own_kind


def way(where: Tensor | torch.device | str, usual: Way, *, cpu: Way, compiled: bool = False) -> Way:
    """Which way on this device: `cpu`, usually from titanmoe.ops.cpu, or `usual`.

    compiled: also in compiled code. Most of what is for CPUs fuses operations, and compilers do that by themselves.
    """
    on_cpu = kind(where) == "cpu" and (compiled or not torch.compiler.is_compiling())
    return cpu if on_cpu else usual


def capability(device: torch.device | None = None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if _instead is None else _instead.capability


def kind_for(setting: str) -> Kind:
    """The device that `[training] device` selects on this machine."""
    if setting == "cpu":
        return "cpu"
    if _instead is not None:
        return _instead.kind
    return "cuda" if torch.cuda.is_available() else "cpu"
