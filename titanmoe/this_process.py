"""This process: the CPU cores that it may use, and whether it is rank 0. Imports nothing of titanmoe."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use by its affinity; a container's quota is not looked at.

    Systems without affinities have the machine's number.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_rank_0() -> bool:
    """Return whether this process is rank 0 or no rank, by the variable RANK, also before it has joined the others."""
    return os.environ.get("RANK", "") in ("", "0")
