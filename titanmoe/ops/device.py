"""Chooses the implementation for a device: GPUs need kernels and few launches, CPUs data that stays in caches.

Only this module decides. Code for CPUs alone is in `titanmoe.ops.cpu`, and `choose` says where it is used. Code that
merely calls torch.cuda, and so needs a real GPU, looks at the tensor's own device. A rehearsal runs on fake CPU tensors
but takes the code of hardware that is absent: `imitate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

Kind = Literal["cpu", "cuda"]
Implementation = TypeVar("Implementation")


class Hardware(NamedTuple):
    """The properties of a device on which the choice of code depends."""

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
"""The hardware that CPU tensors represent during a rehearsal.

A global, because code deep inside autograd has no caller that could pass it on.
"""


@contextmanager
def imitate(hardware: Hardware) -> Iterator[None]:
    """Have this process run the code for this hardware within this context, although tensors are on the CPU."""
    global _instead
    before, _instead = _instead, hardware
    try:
        yield
    finally:
        _instead = before


def is_imitated() -> bool:
    """Return whether CPU tensors stand for other hardware, in a rehearsal (`imitate`)."""
    return _instead is not None


def kind(target: Tensor | torch.device | str) -> str:
    """Return the device type whose code has to run: "cuda", "cpu" or "meta".

    "meta" takes the code of GPUs without kernels.

    Args:
        target: a tensor, a device or a device type. CPU tensors count as the hardware that a rehearsal imitates.
    """
    own_kind = (
        target if isinstance(target, str) else target.type if isinstance(target, torch.device) else target.device.type
    )
    return _instead.kind if _instead is not None and own_kind == "cpu" else own_kind


def choose(
    target: Tensor | torch.device | str, usual: Implementation, *, cpu: Implementation, compiled: bool = False
) -> Implementation:
    """Return one of two implementations: `cpu` for CPUs, else `usual`.

    Args:
        target: a tensor, a device or a device type. In a rehearsal, CPU tensors count as the hardware it imitates.
        usual: the implementation for all devices but CPUs, and for compiled code.
        cpu: the implementation for CPUs, usually from titanmoe.ops.cpu.
        compiled: whether `cpu` is taken in compiled code too. Most code for CPUs fuses operations, which compilers do
            by themselves.
    """
    on_cpu = kind(target) == "cpu" and (compiled or not torch.compiler.is_compiling())
    return cpu if on_cpu else usual


def capability(device: torch.device | None = None) -> tuple[int, int]:
    """Return the compute capability (major, minor) of a GPU (None: the current one).

    In a rehearsal it is that of the imitated hardware, (0, 0) for a CPU. Raises torch's error where there is no GPU.
    """
    return torch.cuda.get_device_capability(device) if _instead is None else _instead.capability


def free_unused_memory(device: torch.device) -> None:
    """Give a GPU's memory back that torch's allocator holds without a tensor in it; do nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def kind_of_setting(setting: str) -> Kind:
    """Return the device type that the value of training.device selects on this machine.

    Args:
        setting: "cpu"; "cuda", also if torch finds no GPU; or "auto", "cpu" if it finds none. In a rehearsal the last
            two select the hardware that it imitates.
    """
    if setting == "cpu":
        return "cpu"
    if _instead is not None:
        return _instead.kind
    return "cuda" if setting == "cuda" or torch.cuda.is_available() else "cpu"
