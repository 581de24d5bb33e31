"""Names for stretches of work, which torch's profiler records while it runs and the clock of a step measures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd import profiler

from titanmoe.replace import replaced

Function = TypeVar("Function", bound=Callable[..., Any])

OTHERS_TURN = "the other half's turn"
"""Work of another thread, which does not belong to any region of this one."""


class RegionListener(Protocol):
    def region(self, name: str) -> AbstractContextManager[None] | None:
        """A context to enter and leave with the region of this name, or None to ignore it."""


_listener: RegionListener | None = None
"""The listener of the running step. A global, because regions are also entered by recomputation, in autograd's own
threads, and in plain functions that no caller could pass it to.
"""


def measured_by(listener: RegionListener) -> AbstractContextManager[None]:
    return replaced(sys.modules[__name__], "_listener", listener)


def region(name: str) -> AbstractContextManager[None]:
    if torch.compiler.is_compiling():  # a graph runs as a whole
        return nullcontext()
    measured = None if _listener is None else _listener.region(name)
    if not profiler._is_profiler_enabled:  # record_function costs 6 us even without a profiler
        return nullcontext() if measured is None else measured
    return profiler.record_function(name) if measured is None else _both(profiler.record_function(name), measured)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def named(name: str) -> Callable[[Function], Function]:
    """Decorator: the function runs inside a region."""

    def wrap(function: Function) -> Function:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with region(name):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    return wrap
