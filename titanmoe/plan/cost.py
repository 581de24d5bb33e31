"""Seconds of a microbatch by component: what every price is added up from."""

from __future__ import annotations

from operator import add
from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds of one microbatch."""

    matrix: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    rows: float = 0.0
    copies: float = 0.0

    def __add__(self, other: tuple) -> Cost:
        return Cost(*map(add, self, other))

    def times(self, factor: float) -> Cost:
        return Cost(*(factor * x for x in self))

    @property
    def seconds(self) -> float:
        return sum(self)
