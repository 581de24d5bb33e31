"""Named stretches of work, and who hears of them: torch's profiler while it runs, and the clock of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd import profiler

Function = TypeVar("Function", bound=Callable[..., Any])

OTHERS_TURN = "the other half's turn"
"""Work of another thread, of no region that this one is in."""


class Listener(Protocol):
    def region(self, name: str) -> AbstractContextManager[None] | None:
        """Entered and left with the region of that name; None: not of interest."""


_listener: Listener | None = None
"""Of the step that runs now. Recomputation enters regions in autograd's own threads, and a copy of rows in a plain
function: nobody could hand it down to either.
"""


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def region(name: str) -> AbstractContextManager[None]:
    if torch.compiler.is_compiling():  # a graph runs as a whole
        return nullcontext()
    heard = None if _listener is None else _listener.region(name)
    if not profiler._is_profiler_enabled:  # record_function costs 6 us even then
        return nullcontext() if heard is None else heard
    return profiler.record_function(name) if heard is None else _both(profiler.record_function(name), heard)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def named(name: str) -> Callable[[Function], Function]:
    """A function that is a region."""

    def wrap(function: Function) -> Function:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with region(name):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    return wrap
