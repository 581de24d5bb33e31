"""Tells the watch, if a run has one, of every message that forward and backward send.

These functions do nothing until a listener takes their place. So a message makes one call for each, and no more: after
a wait none of it is in the caches, and every function or object that is touched costs about a microsecond.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Protocol

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from titanmoe.replace import replaced

OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send", "receive")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE = range(len(OPS))

Name = str | ProcessGroup
"""A process group, or torch's name of it."""


def issued(op: int, x: Tensor, group: Name) -> None:
    """A message with input x is being sent, and from now on this rank waits for it, unless it says when it `waits`."""


def waits(group: Name) -> None:
    """This rank begins to wait for a message of that group that it has issued before."""


def arrived() -> None:
    """This rank has waited for a message, and has it."""


def step_position() -> int:
    """Where the step is: a number that only the listener understands."""
    return 0


def backward_of(step_position: int) -> None:
    """Backward has come to what forward did at that position."""


class MessageListener(Protocol):
    issued: Callable[[int, Tensor, Name], None]
    waits: Callable[[Name], None]
    arrived: Callable[[], None]
    step_position: Callable[[], int]
    backward_of: Callable[[int], None]


@contextmanager
def heard_by(listener: MessageListener, compiled: bool = False) -> Iterator[None]:
    """compiled: whether messages may be in compiled graphs, which run as a whole and are not heard."""
    with ExitStack() as stack:
        for name in MessageListener.__annotations__:
            function = getattr(listener, name)
            stack.enter_context(
                replaced(sys.modules[__name__], name, _outside_graphs(function) if compiled else function)
            )
        yield


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def heard(*args: Any) -> Any:
        return 0 if is_dynamo_compiling() else function(*args)

    return heard
