"""Run work on all ranks of a group, or on one for all: if it fails on any rank, every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from titanmoe.checkpoint import safe_files
from titanmoe.checkpoint.safe_files import CheckpointError

T = TypeVar("T")
Group = Any
"""A process group, or None for a single process."""


def on_all_ranks(group: Group, work: Callable[[], T]) -> list[T]:
    """Call `work` on every rank and return the results of all ranks, in the group's order. Collective over the group.

    Results are pickled. An exception other than these is raised on its rank alone, and the others go on waiting.

    Raises:
        CheckpointError: on all ranks with every distinct reason, if `work` raised one or an OSError on any rank.
    """
    own = _result(work)
    results: list[Any] = [own]
    if group is not None:
        results = [None] * dist.get_world_size(group)
        dist.all_gather_object(results, own, group)
    reasons = dict.fromkeys(reason for _, reason in results if reason)
    if reasons:
        raise CheckpointError("; ".join(reasons))
    return [result for result, _ in results]


def from_rank(group: Group, source: int, work: Callable[[], T]) -> T:
    """Call `work` on the group's rank `source` alone and return its result on all ranks. Collective over the group.

    The result is pickled. An exception other than these is raised on that rank alone, and the others go on waiting.

    Raises:
        CheckpointError: on all ranks, if `work` raised one or an OSError.
    """
    answer: list[Any] = [None]
    if group is None or dist.get_rank(group) == source:
        answer[0] = _result(work)
    if group is not None:
        dist.broadcast_object_list(answer, group=group, group_src=source)
    result, reason = answer[0]
    if reason:
        raise CheckpointError(reason)
    return result


def _result(work: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `work` returns and "", or None and the message of the CheckpointError or OSError that it raised."""
    try:
        return work(), ""
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, safe_files.error_text(error)
