"""Reward functions that fail, always or every second time, and one that an untrained model's completions differ in."""

from __future__ import annotations

import itertools
from typing import Any

CALLS = itertools.count()


def nothing(completion: str, record: dict[str, Any]) -> float:
    raise ValueError("no")


def every_second(completion: str, record: dict[str, Any]) -> float:
    return float("inf") if next(CALLS) % 2 else 1.0


def asks(turns: list[str], record: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the reward -1, or for a completion in three only a reward from 0 to 4, by its bytes.

    `turns` are the completion's turns and the messages between them.
    """
    total = sum("".join(turns).encode())
    return {"message": f"{total % 10}?", "reward": -1.0} if total % 3 else {"reward": total % 5}


def never_ends(turns: list[str], record: dict[str, Any]) -> dict[str, Any]:
    return {"message": "on", "reward": 0.5}


def never_rewards(turns: list[str], record: dict[str, Any]) -> dict[str, Any]:
    return {"message": "on"}


def remainder(completion: str, record: dict[str, Any]) -> float:
    return float(sum(completion.encode()) % 3)
