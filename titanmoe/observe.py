"""Hooks of a run: training code announces points, and observers (metrics, profiler, watch, rehearsal) listen.

Observers change nothing in a run. Without one, a point is a call of an empty function. Training code calls
a method of `observe.active`, or the functions at the end of this file where torch.compile may trace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from torch.compiler import is_compiling

Function = TypeVar("Function", bound=Callable[..., Any])

PHASES = ("data", "forward_backward", "optimizer", "validation", "checkpoint", "other")
"""The phases of a step, in their order; the first three are the step itself."""
OTHERS_TURN = "the other half's turn"
"""Name of the region in which another thread computes, whose work belongs to no region of this thread."""


class Observer:
    """Base class with all points as empty methods. An observer overrides those that it needs."""

    def phase(self, name: str, step: int) -> None:
        """Note that a phase of PHASES begins."""

    def microbatch(self, stage: int, number: int, backward: bool) -> None:
        """Note that this rank begins the forward or backward of a microbatch in a stage."""

    def layer(self, number: int) -> None:
        """Note that forward or backward has reached a layer."""

    def region(self, name: str) -> AbstractContextManager[None] | None:
        """Return a context manager that is entered for the duration of a named region of code, or None."""

    def products(self, experts: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Note that a layer's experts have computed their tokens.

        Args:
            experts: the module.
            inputs: the routed tokens that the rank received, and their routing weights.
            output: the experts' output, before it is sent back.
        """

    def waits(self, group: str) -> None:
        """Note that this rank begins to wait for a message of a process group."""

    def arrived(self) -> None:
        """Note that the message has arrived that `waits` announced."""

    def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
        """Note that the gradients of a step are summed and finite, before they are clipped.

        Args:
            step: number of the step.
            work: the StepWork of the step.
            parameters: the parameters of this rank, by name.
        """

    def updated(self, step: int) -> None:
        """Note that the optimizer has updated the weights."""

    def event(self, step: int, kind: str, text: str, **more: Any) -> None:
        """Note an event, such as a skipped step, with a kind, a text and further fields for events.jsonl."""

    def rank_times(self, steps: list[int], seconds: dict[str, Any]) -> None:
        """Note the seconds that each rank spent on each kind of work, one row per step."""


POINTS = tuple(name for name, value in vars(Observer).items() if callable(value))


class _Several(Observer):
    """Several observers as one. A point that only one of them overrides calls it directly."""

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
"""The observer without effect."""
active: Observer = NOBODY
"""The observers that listen now. A global, because points are also reached in recomputation, in autograd's threads and
in functions that no caller could pass it to."""


@contextmanager
def listening(observer: Observer) -> Iterator[None]:
    """Let an observer listen inside the context, besides those that already do."""
    global active
    active = _Several((*_listening(), observer))
    try:
        yield
    finally:
        left = tuple(one for one in _listening() if one is not observer)
        active = _Several(left) if left else NOBODY


@contextmanager
def unheard() -> Iterator[None]:
    """Let no observer listen inside the context, for work that belongs to no step."""
    global active
    before, active = active, NOBODY
    try:
        yield
    finally:
        active = before


def _listening() -> tuple[Observer, ...]:
    return active.observers if isinstance(active, _Several) else ()


# ---- Points in code that torch.compile may trace. A compiled graph announces nothing. At other points the code calls
# `observe.active` itself.


def products(experts: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Announce `Observer.products`."""
    if not is_compiling():
        active.products(experts, inputs, output)


def waits(group: str) -> None:
    """Announce `Observer.waits`."""
    if not is_compiling():
        active.waits(group)


def arrived() -> None:
    """Announce `Observer.arrived`."""
    if not is_compiling():
        active.arrived()


def region(name: str) -> AbstractContextManager[None]:
    """Return a context manager for a named region, with the observers' contexts for it."""
    return nullcontext() if is_compiling() else active.region(name) or nullcontext()


def named(name: str) -> Callable[[Function], Function]:
    """Return a decorator that runs a function inside a named region."""

    def wrap(function: Function) -> Function:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with region(name):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    return wrap
