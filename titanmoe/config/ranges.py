"""Allowed ranges of the schema's numbers, upper limits of sizes, and divisors for messages.

`titanmoe.config.schema` annotates each number with a Range; `titanmoe.config.laws` checks them. The laws of mappings
use the divisors to suggest legal values.
"""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple


class Violation(NamedTuple):
    """A reason why a config is refused: the paths of its fields, and the message."""

    fields: tuple[str, ...]
    """Paths of the fields that contradict each other or their range."""
    text: str
    """The message: values, constraint and fix."""


class Range(NamedTuple):
    """The allowed values of a number; `value in range` tests one."""

    low: float
    high: float | None = None
    without_low: bool = False
    """Whether `low` itself is not allowed."""
    without_high: bool = False
    """Whether `high` itself is not allowed."""
    derived: bool = False
    """Whether -1 is allowed as well, which stands for "derived from other fields"."""
    reason: str = ""
    """Reason for the limits, for the message."""
    instead: str = ""
    """Advice in place of a value outside the range, for the message."""

    def __contains__(self, value: Any) -> bool:
        if self.derived and value == -1:
            return True
        above = value > self.low if self.without_low else value >= self.low
        below = self.high is None or (value < self.high if self.without_high else value <= self.high)
        return above and below

    def __str__(self) -> str:
        if self.high is not None:
            text = f"in {'(' if self.without_low else '['}{self.low}, {self.high}{')' if self.without_high else ']'}"
            return f"{text}{', or -1' if self.derived else ''}"
        return f"{'above' if self.without_low else 'at least'} {self.low}{', or -1' if self.derived else ''}"


COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, without_low=True)
FRACTION = Range(0, 1)
BELOW_ONE = Range(0, 1, without_high=True)

# The largest sizes are checked before anything is built from them: loops and lists are made per layer, expert and rank.
# Each is far above any model that has been published (126 layers, 384 experts, a vocabulary of 262,144).
LAYERS = 10_000
WIDTH = 2**20
EXPERTS = 2**16
RANKS = 2**20
TOKENS = 2**31
EPOCHS = 10_000
SECONDS = 31_536_000  # a year; a timedelta cannot hold 2**63 seconds

LIMIT = 2**63
"""Upper bound of all numbers, because larger ones do not fit into 64 bits."""


def number_text(number: float) -> str:
    """Return a number as text; integers of more than 256 bits as truncated hex.

    Python refuses to print integers of thousands of digits.
    """
    return hex(number)[:40] + "..." if isinstance(number, int) and number.bit_length() > 256 else str(number)


# ---- divisors, and the few values that a message suggests instead of one that does not fit


def divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order; none for n below 1."""
    low = [d for d in range(1, isqrt(max(0, n)) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


class Replicable(int):
    """A size that a parallel degree may divide or be a multiple of.

    In the second case each item, such as a key head, is on several ranks.
    """


def divides(degree: int, size: int) -> bool:
    """Return whether a parallel degree divides a size, or is a multiple of a size that is Replicable."""
    return size % degree == 0 or (isinstance(size, Replicable) and degree % size == 0)


def nearest_values(values: list[int], near: int) -> str:
    """Return as text the (at most) eight of `values` that are nearest to `near`, in ascending order: "1, 2, 4"."""
    return ", ".join(map(str, sorted(sorted(values, key=lambda value: abs(value - near))[:8])))


def choices_text(name: str, values: list[int], near: int) -> str:
    """Return the part of a message that suggests values for a field: "name = 2", or "name in 1, 2, 4".

    Args:
        values: the values that would be legal.
        near: the illegal value; the eight values nearest to it are listed.
    """
    return f"{name} {'=' if len(values) == 1 else 'in'} {nearest_values(values, near)}"
