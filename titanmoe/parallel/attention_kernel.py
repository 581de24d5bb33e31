"""Pick the kernel that computes 16-bit attention on GPUs, and set torch's own switches for it.

The choice holds for scaled_dot_product_attention and for attention in blocks (titanmoe.parallel.attention_block).
FlashAttention 3 and 4 take the place of 2 in torch's operations. cuDNN is an operation of its own, which torch's
scaled_dot_product_attention takes before any other where it is switched on and knows the shapes.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.attention as attention

from titanmoe.fold.attention_backend import Kernel, kernel_refuses
from titanmoe.ops import device

MAJORS = {"fa2": (8, 9, 10, 11, 12), "fa3": (9,), "fa4": (9, 10), "cudnn": (9, 10)}
"""Major compute capabilities that a kernel runs on.

For FlashAttention those that torch's own code allows; for cuDNN those on which torch prefers it.
"""
PREFERRED: dict[int, tuple[Kernel, ...]] = {9: ("fa3", "cudnn"), 10: ("fa4", "cudnn")}
"""Kernels that "auto" tries in this order, by major compute capability; after them "fa2"."""
PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
TORCH = "2.13"
"""The oldest torch with FlashAttention 3 in 16 bits with a backward (torch/nn/attention/_fa3.py).

torch 2.11 has it in 8 bits, forward only.
"""
CUDNN, CUDNN_OF_LATENTS = 90000, 91100
"""The oldest version of cuDNN, and the oldest for queries 192 wide with values 128 wide (torch 2.13, sdp_utils.cpp)."""


def missing(kernel: str, query_dim: int) -> str:
    """Return why this machine cannot run an attention kernel, as text; "" if it can.

    Args:
        kernel: "fa2", "fa3", "fa4" or "cudnn".
        query_dim: width of a query and key head, which decides how new cuDNN has to be; not checked for the others.
            Whether a kernel computes the widths at all says `kernel_refuses`, not this.
    """
    if device.kind_of_setting("auto") != "cuda":
        return "it runs on GPUs, and there is none"
    major = device.capability()[0]
    if major not in MAJORS[kernel]:
        return f"it does not run on GPUs of compute capability {major}.x"
    if kernel in PACKAGES:
        if torch.__version__ < TORCH or not hasattr(attention, "activate_flash_attention_impl"):
            return f"it needs torch {TORCH}, and this is {torch.__version__}"
        package = PACKAGES[kernel]
        if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
            return f"the package {package} is not installed"
    if kernel == "cudnn" and not device.is_imitated():
        version, oldest = torch.backends.cudnn.version() or 0, CUDNN_OF_LATENTS if query_dim > 128 else CUDNN
        if version < oldest:
            return f"it needs cuDNN {oldest}, and this is {version}"
    return ""


def pick(setting: str, query_dim: int, value_dim: int, deterministic: bool) -> Kernel:
    """Return the attention kernel for a setting: the setting itself, or for "auto" the first in PREFERRED that can run.

    "auto" is "fa2", unchecked, where none of these can run, and on CPUs.

    Args:
        setting: parallelism.attention_kernel; another value than "auto" is not checked here.
        query_dim: width of a query and key head.
        value_dim: width of a value head.
        deterministic: whether deterministic algorithms are required.
    """
    if setting != "auto":
        return setting  # type: ignore[return-value]
    wanted = PREFERRED.get(device.capability()[0], ()) if device.kind_of_setting("auto") == "cuda" else ()
    for kernel in wanted:
        if not kernel_refuses(kernel, query_dim, value_dim, deterministic) and not missing(kernel, query_dim):
            return kernel
    return "fa2"


def use(kernel: Kernel) -> None:
    """Switch attention of all models in this process to a kernel, by torch's global settings.

    Does not check that the kernel can run here, as `missing` does. FlashAttention stays at 2 where torch cannot switch
    it, and in rehearsals.
    """
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    name = kernel.upper() if kernel in PACKAGES else None
    if not hasattr(attention, "activate_flash_attention_impl"):
        return
    if attention.current_flash_attention_impl() not in (None, name):
        attention.restore_flash_attention_impl()
    if name is not None and not device.is_imitated():
        attention.activate_flash_attention_impl(name)
