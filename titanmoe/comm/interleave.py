"""Interleaves two computations on one device: while one waits for what it has sent, the other computes.

Each has its own stack, in a thread of its own, and only one of them, the active side, runs at a time. A side yields
where it would wait for rows that it has sent since it became active, and where its host would wait for counts. So the
order of everything the two launch follows from the two programs, and ranks that run the same pair launch the same
collectives in the same order. Collectives call the functions below; outside of a pair these do nothing. The active side
is not identified by its thread, because on GPUs autograd runs backward in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from threading import Lock

import torch
from torch import Tensor

_active_pair: InterleavedPair | None = None
"""The pair that is running now.

A global, because a collective inside autograd has no caller that could pass it on, and a context variable is not seen
where autograd runs backward in a thread of its own.
"""


class OtherSideFailed(Exception):
    """Raised in the waiting side when the other side failed; `InterleavedPair.run` raises the original error."""


def mark_sent() -> None:
    """Note that the active side has started a message, so that its next `yield_if_sent` lets the other side run."""
    if _active_pair is not None:
        _active_pair.has_sent[_active_pair.turn] = True


def yield_if_sent() -> None:
    """Let the other side run, if the active side has sent a message since it became active.

    Called before the active side waits for a message. Raises OtherSideFailed if the other side has failed.
    """
    if _active_pair is not None:
        _active_pair.yield_if_sent()


def yield_to_other() -> None:
    """Let the other side run. Called before the host waits for anything but routed tokens, such as for their counts.

    It does nothing in the first side until the second has run for the first time: until the first side has routed
    tokens in flight, it has no wait that the second side's computation could fill.

    Raises:
        OtherSideFailed: if the other side has failed.
    """
    if _active_pair is not None and _active_pair.both_began:
        mark_sent()
        yield_if_sent()


def yield_in_backward(x: Tensor) -> None:
    """Call `yield_to_other` during backward, once the operation that made x has passed its gradient on.

    Needed for each `yield_to_other` of a forward, so that the backward of one microbatch yields as often as the forward
    of the other that it is interleaved with. Does nothing if x has no grad_fn, or under torch.compile.
    """
    if not torch.compiler.is_compiling() and x.grad_fn is not None:
        x.grad_fn.register_hook(lambda *_: yield_to_other())


class InterleavedPair:
    """Runs two computations interleaved, the first in the calling thread, the second in a thread that it owns."""

    def __init__(self, while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext):
        """Make a pair whose second side has one thread for all calls of `run`, started by the first.

        Args:
            while_waiting: makes the context manager that a side is in while the other side is active.
        """
        self.while_waiting = while_waiting
        # Kept: a new thread would make its own pool of OpenMP's, and its own handles of GPU libraries, for every pair.
        self.thread = ThreadPoolExecutor(1, "interleave")

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Call both functions interleaved, starting with the first, and return when both have returned.

        May be called again after that. In a process only one pair runs at a time. If one function raises, the other is
        stopped at its next yield by an OtherSideFailed, and the error of the one is raised here.
        """
        global _active_pair
        self.turn, self.both_began = 0, False
        self.has_sent, self.over = [False, False], [False, False]
        self.error: BaseException | None = None
        self.gates = Lock(), Lock()
        for gate in self.gates:
            gate.acquire()
        _active_pair = self
        # Options that the program set in torch are context variables, which a thread does not inherit.
        other = self.thread.submit(copy_context().run, self._play, 1, second)
        try:
            self._play(0, first)
        finally:
            other.result()
            _active_pair = None
        if self.error is not None:
            raise self.error

    def _play(self, side: int, work: Callable[[], None]) -> None:
        if side == 1:
            self.gates[side].acquire()
        try:
            if self.error is None:
                work()
        except BaseException as error:
            if self.error is None:
                self.error = error
        self.over[side] = True
        if self.turn == side:  # an interrupt may reach the one that waits
            self._switch(side)

    def _switch(self, side: int) -> None:
        if not self.over[1 - side]:
            self.turn, self.both_began = 1 - side, True
            self.gates[1 - side].release()

    def yield_if_sent(self) -> None:
        """Let the other side run, if the active side has sent a message since it became active.

        Raises OtherSideFailed if the other side has failed.
        """
        side = self.turn
        if not self.has_sent[side]:
            return
        self.has_sent[side] = False
        if not self.over[1 - side]:
            with self.while_waiting():
                self._switch(side)
                self.gates[side].acquire()
        if self.error is not None:
            raise OtherSideFailed("the other side of this pair failed")
