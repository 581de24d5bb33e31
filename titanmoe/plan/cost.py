"""Seconds of a microbatch by component: what every price is added up from.

Computed by the cost modules beside this one, shown by `titanmoe plan`.
"""

from __future__ import annotations

from operator import add
from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds of one microbatch by component. Added to another `Cost`, it adds up component by component."""

    matrix: float = 0.0
    """Matrix products outside attention's kernels."""
    attention: float = 0.0
    """Kernels of attention."""
    memory: float = 0.0
    """Memory-bound work: norms, activations, permutations."""
    host: float = 0.0
    """Seconds that the device waits for the host's launches."""
    tp: float = 0.0
    """Exposed messages of tp."""
    cp: float = 0.0
    """Exposed messages of cp."""
    dispatch: float = 0.0
    """Exposed messages of routed tokens: dispatch and combine."""
    copies: float = 0.0
    """Casts, copies and sums of weights and gradients."""

    def __add__(self, other: tuple) -> Cost:
        return Cost(*map(add, self, other))

    def times(self, factor: float) -> Cost:
        return Cost(*(factor * x for x in self))

    @property
    def seconds(self) -> float:
        return sum(self)
