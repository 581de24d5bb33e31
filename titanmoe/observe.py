"""The points of a run that can be observed: the code that trains announces them, and whoever watches a run listens.

Observers only listen: a run goes on as it would without them. If nobody listens, a point is a call of an empty
function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from torch.compiler import is_compiling

Function = TypeVar("Function", bound=Callable[..., Any])

PHASES = ("data", "forward_backward", "optimizer", "validation", "checkpoint", "other")
"""In the order of a step; the first three are the step itself."""
OTHERS_TURN = "the other half's turn"
"""A region: work of another thread, which does not belong to any region of this one."""


class Observer:
    """Each point, which does nothing here; an observer has those that it wants to hear."""

    def phase(self, name: str, step: int) -> None:
        """One of PHASES begins."""

    def microbatch(self, stage: int, number: int, backward: bool) -> None:
        """This rank begins the forward or backward of a microbatch."""

    def layer(self, number: int) -> None:
        """Forward or backward has come to this layer."""

    def region(self, name: str) -> AbstractContextManager[None] | None:
        """A named stretch of work begins. Returns a context to enter and leave with it, or None."""

    def products(self, experts: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """A layer's experts have computed rows. inputs: the rows and their routing weights, as they arrived. output:
        before it is sent back."""

    def waits(self, group: str) -> None:
        """This rank begins to wait for a message of that process group."""

    def arrived(self) -> None:
        """It has waited, and has the message."""

    def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
        """The gradients of a step are summed and known to be finite; they are clipped next. work: its StepWork.
        parameters: by name, on this rank."""

    def updated(self, step: int) -> None:
        """The optimizer has made its update."""

    def event(self, step: int, kind: str, text: str, **more: Any) -> None:
        """Something to write down that happened once."""

    def rank_times(self, steps: list[int], seconds: dict[str, Any]) -> None:
        """What each rank spent its time on, a row for each of these steps."""


POINTS = tuple(name for name, value in vars(Observer).items() if callable(value))


class _Several(Observer):
    """Observers as one. A point that only one of them hears calls it directly."""

    def __init__(self, observers: tuple[Observer, ...]):
        self.observers = observers
        for point in POINTS:
            hear = [getattr(one, point) for one in observers if getattr(type(one), point) is not vars(Observer)[point]]
            if len(hear) == 1:
                setattr(self, point, hear[0])
            elif hear:
                setattr(self, point, _all_regions(hear) if point == "region" else _all(hear))


def _all(hear: list[Callable[..., None]]) -> Callable[..., None]:
    def announce(*args: Any, **more: Any) -> None:
        for one in hear:
            one(*args, **more)

    return announce


def _all_regions(hear: list[Callable[[str], Any]]) -> Callable[[str], AbstractContextManager[None] | None]:
    @contextmanager
    def together(contexts: list[AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            yield

    def begin(name: str) -> AbstractContextManager[None] | None:
        contexts = [context for one in hear if (context := one(name)) is not None]
        return together(contexts) if len(contexts) > 1 else contexts[0] if contexts else None

    return begin


NOBODY = Observer()
active: Observer = NOBODY
"""Whoever listens. A global, because points are also reached in recomputation, in autograd's own threads, and in plain
functions that no caller could pass it to."""


@contextmanager
def listening(observer: Observer) -> Iterator[None]:
    global active
    active = _Several((*_listening(), observer))
    try:
        yield
    finally:
        left = tuple(one for one in _listening() if one is not observer)
        active = _Several(left) if left else NOBODY


@contextmanager
def unheard() -> Iterator[None]:
    """Nobody hears what happens inside, which is not part of any step."""
    global active
    before, active = active, NOBODY
    try:
        yield
    finally:
        active = before


def _listening() -> tuple[Observer, ...]:
    return active.observers if isinstance(active, _Several) else ()


# ---- Points that compiled code may reach: a graph runs as a whole and announces nothing. At the others the code calls
# `observe.active` itself.


def products(experts: Any, inputs: tuple[Any, ...], output: Any) -> None:
    if not is_compiling():
        active.products(experts, inputs, output)


def waits(group: str) -> None:
    if not is_compiling():
        active.waits(group)


def arrived() -> None:
    if not is_compiling():
        active.arrived()


def region(name: str) -> AbstractContextManager[None]:
    return nullcontext() if is_compiling() else active.region(name) or nullcontext()


def named(name: str) -> Callable[[Function], Function]:
    """Decorator: the function runs inside a region."""

    def wrap(function: Function) -> Function:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with region(name):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    return wrap
