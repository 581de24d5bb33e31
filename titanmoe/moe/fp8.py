"""The experts' matrix products in 8 bits: `[moe] expert_dtype = "fp8"`.

Both factors are e4m3 with a float32 scale per row: of tokens, of gradients, or of a weight along the summed width,

    q = round(x / s),  s = max|x| over the row / 448        y = (q_x q_w^T) s_x s_w

Forward and the gradient of the inputs are computed so. The gradient of the weights is not: it sums over tokens, which
have different scales. `plain_scaled_grouped_mm` is the reference, and what "fp8_emulated" runs.

Shapes: R routed tokens sorted by local expert, e local experts, D and F the widths of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.moe.expert_products import ExpertProducts
from titanmoe.ops import device
from titanmoe.ops.kernels import fused

LARGEST = 448.0
"""The largest number of e4m3."""


class Quantised(NamedTuple):
    """A tensor in 8 bits: e4m3 numbers, with a float32 scale for each row (along the last dim)."""

    q: Tensor
    scale: Tensor
    """The scale of each row, float32, of q's shape without the last dim."""
    dtype: torch.dtype
    """The dtype before rounding."""


def quantise(x: Tensor, kernels: str = "auto") -> Quantised:
    """Quantise x to e4m3 numbers with a scale per row of the last dim, x ~ q * scale. A row of zeros stays zeros."""
    if fused(kernels, x):
        from titanmoe.ops.kernels.quantise import quantise as by_kernel

        return Quantised(*by_kernel(x), x.dtype)
    return plain_quantise(x)


def plain_quantise(x: Tensor) -> Quantised:
    """Quantise x to e4m3 numbers with a scale per row, by operations of torch: the reference of a kernel."""
    wide = x.to(torch.float32)
    largest = wide.abs().amax(-1)
    # By a tensor: on CUDA torch divides by a number through its reciprocal, and some scales are then a bit off.
    scale = largest / torch.full_like(largest, LARGEST)
    scale = scale.where(scale > 0, 1.0)
    # The division may round to more than the largest number, which becomes NaN in e4m3.
    q = (wide / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    # The hardware's product needs contiguous tensors, also for a transposed weight.
    return Quantised(q.contiguous(), scale.contiguous(), x.dtype)


class QuantisedWeights:
    """The cache of one layer's expert weights in 8 bits.

    If full weights stay in memory during a step (`keep`), their 8-bit copies are cached too, until the next step
    begins: 2 bytes per weight, one for each dim that products sum over. If FSDP frees gathered weights, nothing is
    cached, and they are quantised anew in each pass.
    """

    def __init__(self, kernels: str = "auto"):
        self.kernels = kernels
        self.keep = False
        self.cache: dict[str, Quantised] = {}

    def begin_step(self) -> None:
        """Drop the cached copies, because the weights have changed."""
        self.cache.clear()

    def __call__(self, name: str, weight: Tensor) -> Quantised:
        """Return the weight in 8 bits: from the cache, or quantised anew, and cached if `keep` is set.

        Args:
            name: a key that identifies, within the layer, the weight and the dim along which it is quantised.
            weight: the weight, to be quantised along its last dim.
        """
        if name in self.cache:
            return self.cache[name]
        narrow = quantise(weight, self.kernels)
        if self.keep:
            self.cache[name] = narrow
        return narrow


def plain_scaled_grouped_mm(x: Quantised, w: Quantised, sizes: list[int]) -> Tensor:
    """Multiply the quantised tokens of each expert by its transposed weight, by a loop over experts in float32: (R, F).

    The reference of `torch._scaled_grouped_mm`, rounded to `x.dtype`. `w` has the weights (e, F, D), `sizes` the number
    of each expert's tokens, R together.
    """
    rows = (x.q.to(torch.float32) * x.scale.unsqueeze(1)).split(sizes)
    weights = w.q.to(torch.float32) * w.scale.unsqueeze(2)
    products = [row @ weight.t() for row, weight in zip(rows, weights.unbind(), strict=True)]
    return torch.cat(products).to(x.dtype)


@dataclass(eq=False, kw_only=True)
class EightBitProducts(ExpertProducts):
    """Products of tokens and weights in 8 bits. Gradients of weights are products in the dtype before rounding."""

    rounded: QuantisedWeights = field(default_factory=QuantisedWeights)
    """The layer's cache of weights in 8 bits."""
    emulated: bool = False
    """Whether `plain_scaled_grouped_mm` multiplies instead of the hardware's product; `method` is "loop" then."""

    def token_factor(self, x_RD: Tensor) -> Quantised:
        return quantise(x_RD, self.kernels)

    def weight_factor(self, name: str, w_eFD: Tensor) -> Quantised:
        return self.rounded(name, w_eFD)

    def product(self, x: Quantised, w: Quantised) -> Tensor:
        """Multiply each token by its expert's transposed weight, in x's dtype before rounding: (R, F)."""
        if self.emulated:
            return plain_scaled_grouped_mm(x, w, self.groups.sizes)
        return torch._scaled_grouped_mm(
            x.q, w.q.transpose(1, 2), x.scale, w.scale, offs=self.groups.ends_e, out_dtype=x.dtype, use_fast_accum=True
        )


def missing(on_gpu: bool) -> str:
    """Return why this machine cannot compute products in 8 bits ("fp8", not "fp8_emulated"); "" if it can.

    Only Hopper (9.0) can. `on_gpu` is whether the run is on GPUs.
    """
    if not on_gpu:
        return "the run is on CPUs, which have none"
    if not hasattr(torch, "_scaled_grouped_mm"):
        return f"PyTorch {torch.__version__} has no torch._scaled_grouped_mm"
    capability = device.capability()
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, not Hopper's 9.0"
    return ""
