"""Who hears of every message that forward and backward send: the watch over a run's ranks, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor
from torch.compiler import is_compiling


class MessageListener(Protocol):
    place: int
    """Where the step is, as the listener counts it."""

    def issued(self, op: str, x: Tensor, group: str) -> None:
        """A message whose input is x, to the group that torch calls so."""

    def waits(self, group: str) -> None:
        """This rank begins to wait for a message of that group."""

    def arrived(self) -> None:
        """What this rank has waited for."""

    def back_to(self, place: int) -> None:
        """Backward has come to what forward did there."""


_listener: MessageListener | None = None
"""A global, because messages are sent by autograd's own threads too, and by functions that take no such argument."""


@contextmanager
def heard_by(listener: MessageListener) -> Iterator[None]:
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def issued(op: str, x: Tensor, group: str) -> None:
    if _listener is not None and not is_compiling():  # a graph runs as a whole
        _listener.issued(op, x, group)


def waits(group: str) -> None:
    if _listener is not None and not is_compiling():
        _listener.waits(group)


def arrived() -> None:
    if _listener is not None and not is_compiling():
        _listener.arrived()


def place() -> int:
    return 0 if _listener is None or is_compiling() else _listener.place


def back_to(place: int) -> None:
    if _listener is not None and not is_compiling():
        _listener.back_to(place)
