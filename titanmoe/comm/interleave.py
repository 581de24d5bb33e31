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
    """Note that the active side has sent something."""
    if _active_pair is not None:
        _active_pair.has_sent[_active_pair.turn] = True


def yield_if_sent() -> None:
    """Let the other side run, if the active one has sent something: called where it would wait for it."""
    if _active_pair is not None:
        _active_pair.yield_if_sent()


def yield_to_other() -> None:
    """Let the other side run: called where the host would wait for something other than rows.

    The first side does not yield here before the second has run for the first time: until its own rows are in flight,
    nothing that the second side sends would be covered.
    """
    if _active_pair is not None and _active_pair.both_began:
        _active_pair.has_sent[_active_pair.turn] = True
        _active_pair.yield_if_sent()


def yield_in_backward(x: Tensor) -> None:
    """Call `yield_to_other` in backward, once the operation that made x has passed its gradient on.

    Needed for each `yield_to_other` of a forward. Otherwise forward would yield three times a layer and backward twice,
    and soon forward would become active without anything to compute each time backward has just sent its rows.
    """
    if not torch.compiler.is_compiling() and x.grad_fn is not None:
        x.grad_fn.register_hook(lambda *_: yield_to_other())


class InterleavedPair:
    """Runs two computations interleaved, the first in the calling thread, the second in a thread that it owns."""

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext):
        """Start the thread of the second side.

        Args:
            waiting: makes the context that a side enters for as long as the other is active.
        """
        self.waiting = waiting
        # Kept: a new thread would make its own pool of OpenMP's, and its own handles of GPU libraries, for every pair.
        self.thread = ThreadPoolExecutor(1, "interleave")

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both until both have ended, starting with the first; raise the error of one that fails."""
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

    def _play(self, me: int, work: Callable[[], None]) -> None:
        if me == 1:
            self.gates[me].acquire()
        try:
            if self.error is None:
                work()
        except BaseException as error:
            if self.error is None:
                self.error = error
        self.over[me] = True
        if self.turn == me:  # an interrupt may reach the one that waits
            self._switch(me)

    def _switch(self, me: int) -> None:
        if not self.over[1 - me]:
            self.turn, self.both_began = 1 - me, True
            self.gates[1 - me].release()

    def yield_if_sent(self) -> None:
        """Let the other side run, if the active one has sent something.

        Raises OtherSideFailed if the other has failed.
        """
        me = self.turn
        if not self.has_sent[me]:
            return
        self.has_sent[me] = False
        if not self.over[1 - me]:
            self.wait_for_turn(me)
        if self.error is not None:
            raise OtherSideFailed("the other side of this pair failed")

    def wait_for_turn(self, me: int) -> None:
        """Let the other side run, and block until it yields."""
        with self.waiting():
            self._switch(me)
            self.gates[me].acquire()
