"""Tolerances for two computations of the same numbers on any CPU, from counts of roundings and not by tuning.

A rounding to a dtype errs by at most u = eps / 2; errors are independent, so the squares of n of them add up, to less
than 2 u sqrt(n). Two computations, each with that many `roundings` to a dtype (from the inputs to a number, its own
included) and sums of that many `terms` in its accumulator (float32 for narrower dtypes), differ by at most

    4 sqrt(roundings u(dtype)^2 + terms u(accumulator)^2)

of the tensor's largest entry, or of `scale` where far larger terms cancel. exp and the like count 4 roundings, and a
rounding whose effect is m times as large, such as that of an angle m, counts m^2 times.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def bound(dtype: torch.dtype, terms: int = 0, roundings: int = 1) -> float:
    """Return the allowed difference relative to the largest entry, by this module's formula."""
    accumulator = torch.promote_types(dtype, torch.float32)
    return 4 * math.sqrt(roundings * unit_roundoff(dtype) ** 2 + terms * unit_roundoff(accumulator) ** 2)


def relative_difference(got: Tensor, want: Tensor, scale: float = 0.0) -> float:
    """Return the largest difference relative to the largest finite entry of `want`, or to `scale` if that is larger.

    Equal infinities do not differ, and a NaN is infinitely far. Empty tensors differ by 0.
    """
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    difference = torch.where(got == want, 0.0, (got - want).abs())
    finite = want[want.isfinite()]
    scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
    worst = float(difference.nan_to_num(math.inf).max())
    return worst / scale if scale else math.copysign(math.inf, worst) if worst else 0.0


def assert_close(
    got: Tensor, want: Tensor, terms: int = 0, roundings: int = 1, dtype: torch.dtype | None = None, scale: float = 0.0
) -> None:
    """Assert that two tensors of the same dtype and shape agree within `bound`.

    Args:
        got: the result.
        want: the expected result.
        terms: number of terms of the largest sum.
        roundings: number of roundings to the dtype.
        dtype: the narrowest dtype involved; None for that of the result.
        scale: size of the numbers, if larger than the largest entry.
    """
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, want.dtype, got.shape, want.shape)
    allowed = bound(dtype or want.dtype, terms, roundings)
    off = relative_difference(got, want, scale)
    assert off <= allowed, f"off by {off:.2e} of the largest entry; roundings explain {allowed:.2e}"
