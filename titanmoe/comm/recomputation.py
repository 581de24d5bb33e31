"""What a part of a block that backward computes again keeps of its forward: whatever was sent for, and what the host
waited for. So while it is computed again, it need neither send nor wait for

    numbers of rows, where each row goes, and the routing weights of rows that arrived      always
    the rows that arrived                                                                  if the mode keeps rows

Each call of such a part has a store of its own, because forwards of other microbatches may lie between a forward and
its backward, and schedules that split backward compute the part again each time. Autograd's graph owns the store.

torch computes such a part again up to the last tensor that autograd saved in it, one of the inputs of the experts' down
projection: what dispatchers save, which are small integers, is kept (`keep_saved`). So what comes after this product is
not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class _Store:
    """What one call keeps."""

    def __init__(self, with_rows: bool):
        self.with_rows = with_rows
        self.values: dict[str, list[Any]] = {}
        """By name and in order."""


class _Numbers(NamedTuple):
    """A tensor without its graph, which owns the store."""

    x: Tensor
    requires_grad: bool

    def tensor(self) -> Tensor:
        return self.x.detach().requires_grad_(self.requires_grad)


class _Pass(AbstractContextManager[None]):
    """Forward, or one of the times that backward computes it again."""

    def __init__(self, store: _Store, again: bool):
        self.store, self.again = store, again

    def __enter__(self) -> None:
        self.unread: dict[str, Iterator[Any]] = {name: iter(values) for name, values in self.store.values.items()}
        self.token: Token[_Pass | None] = _running.set(self)

    def __exit__(self, *_: Any) -> None:
        _running.reset(self.token)


_running: ContextVar[_Pass | None] = ContextVar("_running", default=None)
"""A context variable, because of two microbatches that take turns each has its own, and so have autograd's threads."""


def contexts(with_rows: bool = False) -> tuple[_Pass, _Pass]:
    """For `torch.utils.checkpoint`: the contexts of a forward and of computing it again. with_rows: keep these too."""
    store = _Store(with_rows)
    return _Pass(store, again=False), _Pass(store, again=True)


def _pass() -> _Pass | None:
    """None also where nothing is differentiated, as in a dispatcher that a rehearsal runs for another rank."""
    return None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else _running.get()


def again() -> bool:
    """Whether this runs for the sake of what autograd saves, and nothing else of it is used."""
    running = _pass()
    return running is not None and running.again


def keep(name: str, make: Callable[[], Value]) -> Value:
    """What `make` returns, without gradients; in a part that is computed again, what it returned in forward."""
    running = _pass()
    if running is None:
        return make()
    if running.again:
        return next(running.unread[name])
    value = make()
    running.store.values.setdefault(name, []).append(value)
    return value


def keep_tensor(name: str, make: Callable[[], Tensor]) -> Tensor:
    """The same for a tensor that may have a gradient."""
    if again():
        return keep(name, make).tensor()
    x = make()
    keep(name, lambda: _Numbers(x.detach(), x.requires_grad))
    return x


def keep_saved() -> AbstractContextManager[Any]:
    """Inside, what autograd saves is kept. Of nested hooks for saved tensors torch calls the innermost ones alone."""
    return nullcontext() if _pass() is None else torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(x: Tensor) -> Tensor:
    return x


def keep_rows(wait: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the rows that `wait` waits for, with all that belongs to them; in a part that is computed again, those of
    its forward, if the mode keeps rows."""
    running = _pass()
    if running is None or not running.store.with_rows:
        return wait()
    if running.again:
        return tuple(numbers.tensor() for numbers in next(running.unread["rows"]))
    rows = wait()
    keep("rows", lambda: tuple(_Numbers(x.detach(), x.requires_grad) for x in rows))
    return rows


def has_kept_rows() -> bool:
    """Return whether this is computed again from rows that were kept, so that none need be sent."""
    return again() and _pass().store.with_rows
