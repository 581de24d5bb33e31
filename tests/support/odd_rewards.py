"""Reward functions that fail, always or every second time, and one that an untrained model's answers differ in."""

from __future__ import annotations

import itertools
from typing import Any

CALLS = itertools.count()


def nothing(answer: str, record: dict[str, Any]) -> float:
    raise ValueError("no")


def every_second(answer: str, record: dict[str, Any]) -> float:
    return float("inf") if next(CALLS) % 2 else 1.0


def remainder(answer: str, record: dict[str, Any]) -> float:
    return float(sum(answer.encode()) % 3)
