"""Hooks of a run: training code announces points, and observers (metrics, profiler, watch, rehearsal) listen.

Observers change nothing in a run. Without one, a point is a call of an empty function. Training code calls
a method of `observe.active`, or the functions at the end of this file where torch.compile may trace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.compiler import is_compiling

if TYPE_CHECKING:
    import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

OTHERS_TURN = "the other half's turn"
"""Name of the region in which another thread computes, whose work belongs to no region of this thread."""


class Observer:
    """Base class of observers, with an empty method for each point of a step that training code announces.

    An observer overrides the methods of the points that it needs. Methods are called on the rank that reaches the
    point, and must not change the run.
    """

    def phase(self, name: str, step: int) -> None:
        """Note that a phase of the step begins.

        Args:
            name: in the order of a step "data", "forward_backward" and "optimizer", which are the step itself, then
                "validation", "checkpoint" and "other". A step of reinforcement learning that begins with new
                completions has "generate" and "reward" after "data".
            step: number of the step.
        """

    def microbatch(self, stage: int, number: int, backward: bool) -> None:
        """Note that this rank begins a microbatch's forward or backward in a pipeline stage.

        Args:
            stage: number of the stage in the pipeline.
            number: index of the microbatch among those that run together, the step's in training.
            backward: whether it is the backward.
        """

    def layer(self, number: int) -> None:
        """Note that forward or backward has reached the block with this number in the full model."""

    def region(self, name: str) -> AbstractContextManager[None] | None:
        """Return a context manager to be entered while a named region of code runs, such as "dispatch"; or None."""

    def products(self, experts: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Note that the experts of a layer have computed the routed tokens on this rank.

        Args:
            experts: the module.
            inputs: the routed tokens that the rank received (R, D), and their routing weights (R, 1).
            output: the experts' output (R, D), before it is sent back.
        """

    def waits(self, group: str) -> None:
        """Note that this rank begins to wait for a message of a process group, named as torch does (`group_name`)."""

    def arrived(self) -> None:
        """Note that the message has come for which this rank has waited since the last call of `waits`."""

    def gradients(self, step: int, work: Any, parameters: dict[str, nn.Parameter]) -> None:
        """Note that a step's gradients, in `.grad`, are summed over ranks, finite, not yet clipped; an update follows.

        Args:
            step: number of the step.
            work: the step's microbatches, a titanmoe.train.gradients.StepWork.
            parameters: the trained parameters of this rank, by name.
        """

    def updated(self, step: int) -> None:
        """Note that the optimizer has updated the weights, as it has not in a skipped step."""

    def event(self, step: int, kind: str, text: str, **more: Any) -> None:
        """Note an event, which a line of events.jsonl records.

        Args:
            step: number of the step.
            kind: "skip", "save", "stop", ... (docs/watching.md).
            text: what happened, for the user.
            more: further fields of the line, which JSON can hold.
        """

    def rank_times(self, steps: list[int], seconds: dict[str, np.ndarray]) -> None:
        """Note how long each rank took in some steps.

        Args:
            steps: numbers of the steps.
            seconds: by kind of work, an array of seconds of shape (steps, ranks).
        """


POINTS = tuple(name for name, value in vars(Observer).items() if callable(value))


class _SeveralObservers(Observer):
    """Several observers as one. A point that only one of them overrides calls it directly."""

    def __init__(self, observers: tuple[Observer, ...]):
        self.observers = observers
        for point in POINTS:
            hear = [getattr(one, point) for one in observers if getattr(type(one), point) is not vars(Observer)[point]]
            if len(hear) == 1:
                setattr(self, point, hear[0])
            elif hear:
                setattr(self, point, _call_all_regions(hear) if point == "region" else _call_all(hear))


def _call_all(hear: list[Callable[..., None]]) -> Callable[..., None]:
    """Return a function that calls these bound methods of several observers in turn, with its own arguments."""

    def announce(*args: Any, **more: Any) -> None:
        for one in hear:
            one(*args, **more)

    return announce


def _call_all_regions(hear: list[Callable[[str], Any]]) -> Callable[[str], AbstractContextManager[None] | None]:
    """Return a function from a region's name to a context that enters all observers' contexts, or to None if none."""

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
    """Add an observer to those that all threads of this process call, for the duration of this context."""
    global active
    active = _SeveralObservers((*_listening(), observer))
    try:
        yield
    finally:
        left = tuple(one for one in _listening() if one is not observer)
        active = _SeveralObservers(left) if left else NOBODY


@contextmanager
def unheard() -> Iterator[None]:
    """Call no observer in this context, in any thread, for work that is of no step, such as evaluating the teacher."""
    global active
    before, active = active, NOBODY
    try:
        yield
    finally:
        active = before


def _listening() -> tuple[Observer, ...]:
    """Return the observers that listen now; () without any, and within `unheard`."""
    return active.observers if isinstance(active, _SeveralObservers) else ()


# ---- Points in code that torch.compile may trace. A compiled graph announces nothing. At other points the code calls
# `observe.active` itself.


def products(experts: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Tell all active observers that a layer's experts have computed the routed tokens on this rank.

    Does nothing in code that torch.compile traces. With R routed tokens, `inputs` are these tokens (R, D) and their
    routing weights (R, 1), and `output` is (R, D).
    """
    if not is_compiling():
        active.products(experts, inputs, output)


def waits(group: str) -> None:
    """Tell all active observers that this rank begins to wait for a message of a process group, by torch's name of it.

    Does nothing in code that torch.compile traces.
    """
    if not is_compiling():
        active.waits(group)


def arrived() -> None:
    """Tell all active observers that the message announced by the last call of `waits` has come.

    Does nothing in code that torch.compile traces.
    """
    if not is_compiling():
        active.arrived()


def region(name: str) -> AbstractContextManager[None]:
    """Return a context manager that names a region of code, such as "dispatch", for all active observers.

    The context does nothing in code that torch.compile traces.
    """
    return nullcontext() if is_compiling() else active.region(name) or nullcontext()


def named(name: str) -> Callable[[Function], Function]:
    """Return a decorator for a function whose calls are a region with this name, for all active observers."""

    def wrap(function: Function) -> Function:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with region(name):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    return wrap
