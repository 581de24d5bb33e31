"""The experts of this rank: a grouped SwiGLU.

Shapes: R routed rows sorted by local expert, e local experts, D model, F this rank's hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm import local
from titanmoe.config.schema import Model
from titanmoe.config.schema import MoE as MoEOptions

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_loop(x_RD: Tensor, w_eFD: Tensor, count_e: Tensor) -> Tensor:
    """Rows of expert i times its matrix, one product per expert. Empty groups give exact zero gradients."""
    groups = x_RD.split(count_e.tolist())
    return torch.cat([x @ w.t() for x, w in zip(groups, w_eFD.unbind(), strict=True)])


def grouped_product(x_RD: Tensor, w_eFD: Tensor, count_e: Tensor) -> Tensor:
    """The same in one call of torch's grouped matrix product."""
    return torch._grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=count_e.cumsum(0).to(torch.int32))


def can_group(x: Tensor, *widths: int) -> bool:
    """torch's grouped product wants rows of whole 16-byte units, no float64; on GPUs bfloat16, Hopper or later."""
    if x.dtype == torch.float64 or any(width * x.element_size() % 16 for width in widths):
        return False
    if x.device.type == "cuda":
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return True


class Experts(nn.Module):
    def __init__(self, model: Model, options: MoEOptions, dtype: torch.dtype):
        super().__init__()
        shape = (model.num_experts, model.expert_hidden, model.dim)
        self.w1 = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(shape[0], shape[2], shape[1], dtype=dtype))
        self.grouped_mm = options.grouped_mm

    def forward(self, x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
        w1_eFD, w3_eFD, w2_eDF = local(self.w1), local(self.w3), local(self.w2)
        product = grouped_loop
        if self.grouped_mm != "loop" and can_group(x_RD, *w1_eFD.shape[1:]):
            product = grouped_product
        gate_RF, up_RF = product(x_RD, w1_eFD, count_e), product(x_RD, w3_eFD, count_e)
        return self.down(product, gate_RF, up_RF, weight_R1, w2_eDF, count_e)

    def down(
        self, product: Product, gate_RF: Tensor, up_RF: Tensor, weight_R1: Tensor, w2_eDF: Tensor, count_e: Tensor
    ) -> Tensor:
        # The routing weight enters before the down projection, so that backward need not keep the experts' outputs.
        h_RF = (F.silu(gate_RF) * up_RF * weight_R1).to(w2_eDF.dtype)
        return product(h_RF, w2_eDF, count_e)
