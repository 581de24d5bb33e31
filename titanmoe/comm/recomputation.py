"""Save what recomputation must not repeat in checkpointed regions: messages of sizes and indices, and host waits.

titanmoe.parallel.recompute makes such regions with `torch.utils.checkpoint`, which saves a region's inputs and
recomputes it up to the last tensor that autograd saved in it. Two kinds of values are saved besides:

    cached(make)    what was received or read by the host; collectives, counts and host reads in titanmoe.comm call it
    save_tensors()  small tensors that autograd saves inside, such as indices: so recomputation may end before them

Each call of a region has a cache of its own, owned by autograd's graph: forwards of other microbatches may lie between
its forward and backward, and schedules that split backward recompute it twice.
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
    """The context of one call of a checkpointed region: a forward, which fills a cache, or its recomputation."""

    def __init__(self, cache: list[Any], recomputes: bool):
        self.cache, self.recomputes = cache, recomputes

    def __enter__(self) -> None:
        self.unread = iter(self.cache)
        self.token: Token[_Pass | None] = _current_pass.set(self)

    def __exit__(self, *_: Any) -> None:
        _current_pass.reset(self.token)


_current_pass: ContextVar[_Pass | None] = ContextVar("_current_pass", default=None)
"""The call of a checkpointed region that is running; None outside.

A context variable, because two microbatches that take turns each have their own, and so have autograd's threads.
"""


def region_contexts() -> tuple[_Pass, _Pass]:
    """Return two context managers for `torch.utils.checkpoint`: for the forward of a region, and for its recomputation.

    Both share one cache. Call it anew for every call of the region, as the argument `context_fn` does.
    """
    cache: list[Any] = []
    return _Pass(cache, recomputes=False), _Pass(cache, recomputes=True)


def _running_pass() -> _Pass | None:
    """Return the call of a checkpointed region that is running; None outside, and in code that torch.compile traces."""
    return None if torch.compiler.is_compiling() else _current_pass.get()


def in_checkpointed_region() -> bool:
    """Return whether the caller is in a checkpointed region, in its forward or while backward recomputes it.

    Always False in code that torch.compile traces.
    """
    return _running_pass() is not None


def recomputing() -> bool:
    """Return whether backward is now recomputing a checkpointed region, whose output nothing uses then.

    Always False in code that torch.compile traces.
    """
    current = _running_pass()
    return current is not None and current.recomputes


def cached(make: Callable[[], Value]) -> Value:
    """Call `make` and return its value; while a checkpointed region is recomputed, return the value cached in forward.

    Outside of a checkpointed region `make` is always called. Recomputation must make the same calls of this function in
    the same order, up to where it ends. Calls of `cached` inside `make` cache nothing. Not differentiable.
    """
    current = _running_pass()
    if current is None:
        return make()
    if current.recomputes:
        return next(current.unread)
    with _outside_checkpointed_region():
        value = make()
    current.cache.append(value)
    return value


def cached_tensor(make: Callable[[], Tensor]) -> Tensor:
    """Call `make` outside of the checkpointed region, and return its tensor. Differentiable.

    `make` saves its tensors for backward and is not recomputed: while the region is recomputed, the tensor's cached
    values are returned, without an autograd graph.
    """
    if not in_checkpointed_region():
        return make()
    if recomputing():
        x, requires_grad = cached(make)
        return x.detach().requires_grad_(requires_grad)
    with leave_checkpointed_region():
        x = make()
    cached(lambda: (x.detach(), x.requires_grad))  # the graph owns the cache, so the cache must not own the graph
    return x


@contextmanager
def leave_checkpointed_region() -> Iterator[None]:
    """Run the body of this context as if outside of the checkpointed region: tensors are saved, nothing is cached."""
    with _outside_checkpointed_region(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        yield


def save_tensors() -> AbstractContextManager[Any]:
    """Return a context in which a checkpointed region saves tensors for backward instead of recomputing them.

    For small tensors such as indices, so that recomputation may end before them. Outside of a region it does nothing.
    """
    # Of nested hooks for saved tensors torch calls the innermost ones alone, and so not those of the region.
    return torch.autograd.graph.saved_tensors_hooks(_same, _same) if in_checkpointed_region() else nullcontext()


@contextmanager
def _outside_checkpointed_region() -> Iterator[None]:
    token = _current_pass.set(None)
    try:
        yield
    finally:
        _current_pass.reset(token)


def _same(x: Tensor) -> Tensor:
    return x
