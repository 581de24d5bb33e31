"""Divisors, and the few values that a message suggests instead of one that does not fit."""

from __future__ import annotations

from math import isqrt


def divisors(n: int) -> list[int]:
    """Ascending; none for 0 and less."""
    low = [d for d in range(1, isqrt(max(0, n)) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


class Repeated(int):
    """A number that a degree divides or is a multiple of. Each part is then on several ranks."""


def fits(degree: int, number: int) -> bool:
    """Whether a degree divides a number, or may be a multiple of it and is."""
    return number % degree == 0 or (isinstance(number, Repeated) and degree % number == 0)


def nearest_values(values: list[int], near: int) -> str:
    """The values, or the eight nearest if there are many, as in "1, 2, 4"."""
    return ", ".join(map(str, sorted(sorted(values, key=lambda value: abs(value - near))[:8])))


def choices(name: str, values: list[int], near: int) -> str:
    """For a fix: name = 2, or name in 1, 2, 4."""
    return f"{name} {'=' if len(values) == 1 else 'in'} {nearest_values(values, near)}"
