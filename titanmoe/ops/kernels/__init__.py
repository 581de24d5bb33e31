"""Triton kernels, and whether they run here. The files of kernels are only imported where Triton is installed.

Each kernel has a plain reference in torch beside its caller, which the docstring of the kernel's file names.
"""

from __future__ import annotations

import importlib.util
import os

from torch import Tensor

from titanmoe.ops import device


def interpreted() -> bool:
    """Return whether Triton interprets kernels on CPUs, by the environment variable TRITON_INTERPRET.

    Triton reads the variable when it is imported, so this needs a process of its own.
    """
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_INSTALLED = importlib.util.find_spec("triton") is not None  # looked up here, because a traced function cannot


def installed() -> bool:
    """Return whether Triton is installed."""
    return _INSTALLED


def fused(kernels: str, x: Tensor) -> bool:
    """Return whether Triton kernels compute this tensor, rather than operations of torch.

    In a rehearsal CPU tensors count as those of the imitated hardware.

    Args:
        kernels: the option `[moe] kernels`: "triton" always, "auto" on GPUs with Triton.
    """
    return kernels == "triton" or (kernels == "auto" and device.kind(x) == "cuda" and installed())


def missing(on_gpu: bool) -> str:
    """Return why Triton kernels cannot run: not installed, or on CPUs and not interpreted; "" if they can.

    Args:
        on_gpu: whether the run is on GPUs.
    """
    if not installed():
        return "Triton is not installed"
    if not on_gpu and not interpreted():
        return "Triton compiles for GPUs and the run is on CPUs"
    return ""
