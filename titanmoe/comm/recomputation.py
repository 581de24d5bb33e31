"""What regions that backward recomputes do not repeat: messages that tell sizes and places, and waits of the host.

titanmoe.parallel.recompute makes the regions, with `torch.utils.checkpoint`, which saves a region's inputs and
recomputes it up to the last tensor that autograd saved in it. Two things are saved besides:

    cached(make)    what was received or read by the host; the collectives, counts and host reads of this room call it
    saved()         small tensors that autograd saves inside, such as places: so a region need not be recomputed to them

Each call of a region has a cache of its own, because forwards of other microbatches may lie between its forward and its
backward, and schedules that split backward recompute it twice. Autograd's graph owns the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class _Pass(AbstractContextManager[None]):
    """The forward of one call of a region, or a recomputation of it."""

    def __init__(self, cache: list[Any], recomputes: bool):
        self.cache, self.recomputes = cache, recomputes

    def __enter__(self) -> None:
        self.unread = iter(self.cache)
        self.token: Token[_Pass | None] = _running.set(self)

    def __exit__(self, *_: Any) -> None:
        _running.reset(self.token)


_running: ContextVar[_Pass | None] = ContextVar("_running", default=None)
"""A context variable, because of two microbatches that take turns each has its own, and so have autograd's threads."""


def contexts() -> tuple[_Pass, _Pass]:
    """Return the contexts of a region's forward and of its recomputation, for `torch.utils.checkpoint`."""
    cache: list[Any] = []
    return _Pass(cache, recomputes=False), _Pass(cache, recomputes=True)


def in_region() -> bool:
    """Return whether this runs in a region, in its forward or while backward recomputes it."""
    return not torch.compiler.is_compiling() and _running.get() is not None


def recomputing() -> bool:
    """Return whether backward recomputes a region: only what autograd saves in it is used, no output."""
    return in_region() and _running.get().recomputes


def cached(make: Callable[[], Value]) -> Value:
    """Return what `make` returns; while a region is recomputed, what it returned in forward.

    Recomputation must make the same calls of this function in the same order, up to where it ends. What `make` itself
    calls is not cached. Not differentiable.
    """
    if not in_region():
        return make()
    region = _running.get()
    if region.recomputes:
        return next(region.unread)
    with _no_region():
        value = make()
    region.cache.append(value)
    return value


def cached_tensor(make: Callable[[], Tensor]) -> Tensor:
    """Return what `make` returns, a tensor with its graph; while a region is recomputed, its values.

    So `make` is no part of the region: what it saves for backward is saved.
    """
    if not in_region():
        return make()
    if recomputing():
        x, requires_grad = cached(make)
        return x.detach().requires_grad_(requires_grad)
    with outside():
        x = make()
    cached(lambda: (x.detach(), x.requires_grad))  # the graph owns the cache, so the cache must not own the graph
    return x


@contextmanager
def outside() -> Iterator[None]:
    """Leave the region that is running: inside, tensors are saved for backward and nothing is cached."""
    with _no_region(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        yield


def saved() -> AbstractContextManager[Any]:
    """Save what autograd saves inside as it is, for tensors that are small.

    Of nested hooks for saved tensors torch calls the innermost ones alone, and so not those of the region.
    """
    return torch.autograd.graph.saved_tensors_hooks(_same, _same) if in_region() else nullcontext()


@contextmanager
def _no_region() -> Iterator[None]:
    token = _running.set(None)
    try:
        yield
    finally:
        _running.reset(token)


def _same(x: Tensor) -> Tensor:
    return x
