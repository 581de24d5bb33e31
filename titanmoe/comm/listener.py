"""Tells the watch, if a run has one, of every message that forward and backward send."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch.compiler import is_compiling

from titanmoe.replace import replaced


class MessageListener(Protocol):
    step_position: int
    """Where the step is: a number that only the listener understands."""

    def issued(self, op: str, x: Tensor, group: str) -> None:
        """A message with input x is being sent; `group` is torch's name of its process group."""

    def waits(self, group: str) -> None:
        """This rank begins to wait for a message of that group."""

    def arrived(self) -> None:
        """This rank has waited for a message, and has it."""

    def backward_of(self, step_position: int) -> None:
        """Backward has come to what forward did at that position."""


_listener: MessageListener | None = None
"""A global, because messages are also sent by autograd's own threads and by functions that take no such argument."""


def heard_by(listener: MessageListener) -> AbstractContextManager[None]:
    return replaced(sys.modules[__name__], "_listener", listener)


def issued(op: str, x: Tensor, group: str) -> None:
    if _listener is not None and not is_compiling():  # a graph runs as a whole
        _listener.issued(op, x, group)


def waits(group: str) -> None:
    if _listener is not None and not is_compiling():
        _listener.waits(group)


def arrived() -> None:
    if _listener is not None and not is_compiling():
        _listener.arrived()


def step_position() -> int:
    return 0 if _listener is None or is_compiling() else _listener.step_position


def backward_of(step_position: int) -> None:
    if _listener is not None and not is_compiling():
        _listener.backward_of(step_position)
