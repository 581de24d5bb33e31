"""Run work on all ranks of a group, or on one for all: if it fails on any rank, every rank raises.

Called around work on the files of a checkpoint. Ranks exchange results and reasons of failure, so that none waits in a
later collective for a rank that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from titanmoe.checkpoint import safe_files
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config.load import ConfigError

T = TypeVar("T")
Group = Any
"""A process group, or None for a single process."""


def size_and_rank(group: Group) -> tuple[int, int]:
    """Return the group's size and this process's rank in it; (1, 0) without a group."""
    return (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)


class _Outcome(NamedTuple):
    """Outcome of a rank's work, as it is sent to the others."""

    result: Any
    reason: str
    """Message of the CheckpointError or OSError that the work raised; "" if it raised none."""
    unexpected: str
    """Rank in the world, type and message of any other exception that the work raised; "" if it raised none."""


def on_all_ranks(group: Group, work: Callable[[], T]) -> list[T]:
    """Call `work` on every rank and return the results of all ranks, in the group's order. Collective over the group.

    Results are pickled.

    Raises:
        CheckpointError: on all ranks with every distinct reason, if `work` raised one or an OSError on any rank.
        Exception: any other that `work` raised, on its rank; all others raise a RuntimeError that names both.
    """
    local, error = _outcome(work)
    outcomes: list[Any] = [local]
    if group is not None:
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, local, group)
    _raise_unexpected(error, (outcome.unexpected for outcome in outcomes))
    reasons = dict.fromkeys(outcome.reason for outcome in outcomes if outcome.reason)
    if reasons:
        raise CheckpointError("; ".join(reasons))
    return [outcome.result for outcome in outcomes]


def raise_on_all_ranks(group: Group, work: Callable[[], T]) -> T:
    """Call `work` on every rank and return this rank's result; if it fails on any rank, raise on all.

    Collective over the group. Results are not sent.

    Raises:
        ConfigError: with every distinct problem, if `work` raised a ConfigError, CheckpointError or OSError on any
            rank.
        Exception: any other that `work` raised, on its rank; all others raise a RuntimeError that names both.
    """
    result: Any = None

    def find_problems() -> tuple[list[str], str]:
        nonlocal result
        try:
            result = work()
        except ConfigError as error:
            return error.problems, error.source
        except CheckpointError as error:
            return [str(error)], ""
        except OSError as error:
            return [safe_files.error_text(error)], ""
        return [], ""

    reports = on_all_ranks(group, find_problems)
    if distinct := dict.fromkeys(problem for problems, _ in reports for problem in problems):
        raise ConfigError(list(distinct), next((source for _, source in reports if source), ""))
    return result


def from_rank(group: Group, source: int, work: Callable[[], T]) -> T:
    """Call `work` on the group's rank `source` alone and return its result on all ranks. Collective over the group.

    The result is pickled.

    Raises:
        CheckpointError: on all ranks, if `work` raised one or an OSError.
        Exception: any other that `work` raised, on `source`; all others raise a RuntimeError that names both.
    """
    received: list[Any] = [None]
    error: Exception | None = None
    if group is None or dist.get_rank(group) == source:
        received[0], error = _outcome(work)
    if group is not None:
        dist.broadcast_object_list(received, group=group, group_src=source)
    (outcome,) = received
    _raise_unexpected(error, [outcome.unexpected])
    if outcome.reason:
        raise CheckpointError(outcome.reason)
    return outcome.result


def _outcome(work: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
    """Call `work`; return what to send to the other ranks, and the exception if it is an unexpected one."""
    try:
        return _Outcome(work(), "", ""), None
    except CheckpointError as error:
        return _Outcome(None, str(error), ""), None
    except OSError as error:
        return _Outcome(None, safe_files.error_text(error), ""), None
    except Exception as error:  # the other ranks wait for this one
        rank = dist.get_rank() if dist.is_initialized() else 0
        return _Outcome(None, "", f"rank {rank} raised {type(error).__name__}: {error}"), error


def _raise_unexpected(error: Exception | None, lines: Iterable[str]) -> None:
    """Raise this rank's own exception, or a RuntimeError with those of other ranks; return if there is none.

    The RuntimeError is no CheckpointError, because callers go on after some of those, which the rank at fault does not.

    Args:
        error: the exception that this rank has caught.
        lines: the line on the exception of each rank; "" for a rank without.
    """
    if error is not None:
        raise error
    if text := "; ".join(filter(None, lines)):
        raise RuntimeError(text)
