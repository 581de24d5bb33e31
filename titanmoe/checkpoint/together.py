"""Work that every rank of a group does, and that counts as done only if none of them failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from titanmoe.checkpoint import inside
from titanmoe.checkpoint.inside import CheckpointError

T = TypeVar("T")
Group = Any
"""A process group, or None for a single process."""


def together(group: Group, work: Callable[[], T]) -> list[T]:
    """What work returns on each rank; if it fails on any, CheckpointError on all of them, with every different
    reason."""
    mine: tuple[T | None, str]
    try:
        mine = work(), ""
    except CheckpointError as error:
        mine = None, str(error)
    except OSError as error:
        mine = None, inside.error_text(error)
    everyone: list[Any] = [mine]
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group)
    reasons = dict.fromkeys(reason for _, reason in everyone if reason)
    if reasons:
        raise CheckpointError("; ".join(reasons))
    return [result for result, _ in everyone]
