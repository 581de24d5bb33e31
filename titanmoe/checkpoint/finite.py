"""Whether numbers are finite: what contains a NaN or an infinity is not worth keeping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def first_nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """The first that contains a NaN or an infinity, and how many; empty if none does.

    All norms come from one fused pass, and are finite only where every number is. A norm of finite numbers can overflow
    too, so whatever has an infinite norm is checked number by number.
    """
    nonempty = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if not nonempty:
        return ""
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(nonempty.values()))]).tolist()
    for (name, tensor), norm in zip(nonempty.items(), norms, strict=True):
        if not math.isfinite(norm) and (bad := tensor.numel() - int(tensor.isfinite().sum())):
            return f"{name} ({bad:,} of {tensor.numel():,} numbers are NaN or infinite)"
    return ""
