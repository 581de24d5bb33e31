"""Fills receive buffers of symmetric memory with NaN before every exchange, from the import of this module on.

A row that is read without having been written then gives a NaN. N rows are sent, M received.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from titanmoe.moe.dispatchers.symmetric_buffers import SymmetricBuffers

exchanges: list[str] = []
"""Name of the buffers of each exchange so far."""
_exchange = SymmetricBuffers.exchange


def _from_nan(self: SymmetricBuffers, rows: Sequence[Tensor], to_N: Tensor, from_M: Tensor) -> tuple[Tensor, ...]:
    exchanges.append(self.name)
    for kind in (self.rows, self.weights):  # peers write only after this rank has entered the first barrier
        kind.of_ranks[self.group.rank].fill_(float("nan"))
    return _exchange(self, rows, to_N, from_M)


SymmetricBuffers.exchange = _from_nan
