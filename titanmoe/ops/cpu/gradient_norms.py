"""Norms of gradients on CPUs, where torch would copy a whole tensor to widen it: so rows are summed first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

ROW = 4096
"""This many squares are summed in the gradient's dtype, or in float32 if that is wider."""


def norms(grads: list[Tensor]) -> list[Tensor]:
    """In float64."""
    out = []
    for grad in grads:
        wide = torch.promote_types(grad.dtype, torch.float32)
        out.append(torch.cat([vector_norm(rows, dim=1, dtype=wide).double() for rows in _rows(grad)]).norm())
    return out


def _rows(grad: Tensor) -> tuple[Tensor, ...]:
    flat = grad.reshape(-1)
    whole = len(flat) // ROW * ROW
    return flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)
