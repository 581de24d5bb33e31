"""Rows that a rank sends through symmetric memory, by its dispatcher's own code.

Shapes as in titanmoe.moe.symmetric.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Rows = tuple[int, ...]


class RowCounter:
    """Stands in for a rank's SymmetricBuffers, to count the rows it would send. They have no width and go nowhere."""

    rows = weights = None

    def __init__(self, away_rows: int):
        self.away_rows, self.overflowed = away_rows, torch.zeros((), dtype=torch.bool)

    def dispatch(self, buffers: None, x_HD: Tensor, send_Ge: Tensor) -> tuple[Tensor, Tensor]:
        self.send_Ge = send_Ge
        return x_HD.new_zeros(self.away_rows, x_HD.shape[1]), send_Ge.new_zeros(2, len(send_Ge))


def rows_sent(send_Ge: Any, ranks: int) -> Rows:
    """To each rank of the group."""
    experts_per_rank = len(send_Ge) // ranks
    return tuple(int(sum(send_Ge[rank * experts_per_rank : (rank + 1) * experts_per_rank])) for rank in range(ranks))
