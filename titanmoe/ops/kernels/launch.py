"""What all launches share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def tile(width: int, numbers: int) -> tuple[int, int]:
    """Rows and columns of a program that holds that many numbers at a time, for rows of that width."""
    columns = min(triton.next_power_of_2(width), numbers)
    return numbers // columns, columns


def wide(dtype: torch.dtype) -> tl.dtype:
    """The dtype of sums."""
    return tl.float64 if dtype == torch.float64 else tl.float32
