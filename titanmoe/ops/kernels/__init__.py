"""Triton kernels, each with its plain reference elsewhere. Nothing here is imported without Triton.

slot_kernels     which slot each choice gets      titanmoe.moe.send_slots
permute_rows     tokens into slots and back       titanmoe.moe.permute
rotate           rotary positions                 titanmoe.models.layers
rms_norm         norms of rows                    titanmoe.models.layers
latent_heads     queries and keys of latents      titanmoe.models.latent_attention
weighted_swiglu  the experts' activation          titanmoe.moe.expert_products.plain_swiglu
router_entropy   how evenly scores are spread     titanmoe.moe.layer_statistics.entropy_and_count
route            scores, choice, weights, counts  titanmoe.moe.router
bfloat16_terms   float32 as bfloat16 parts        titanmoe.moe.router_product
quantise         rows to 8 bits                   titanmoe.moe.fp8
add_gradient     sums of the experts' gradients   titanmoe.moe.grouped_mm.plain_add_gradient
loss             slices of the logits             titanmoe.models.logit_slices
put              rows to other GPUs' memory       titanmoe.moe.dispatchers.symmetric_buffers
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

    Args:
        kernels: the option `[moe] kernels`: "triton" always, "auto" on GPUs with Triton.
        x: the tensor.
    """
    return kernels == "triton" or (kernels == "auto" and device.kind(x) == "cuda" and installed())


def missing(on_gpu: bool) -> str:
    """Return why Triton kernels cannot run in this process; "" if they can.

    Args:
        on_gpu: whether the run is on GPUs.
    """
    if not installed():
        return "Triton is not installed"
    if not on_gpu and not interpreted():
        return "Triton compiles for GPUs and the run is on CPUs"
    return ""
