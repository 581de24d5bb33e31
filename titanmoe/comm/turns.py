"""Run two computations in turns on one device: while one waits for a collective in flight, the other computes.

Each has its own stack, in a thread of its own, and one of them runs at a time. It yields where it would wait for a
message that it has sent since its turn began, and where its host would wait for counts. So the order of everything the
two launch follows from the two programs, and ranks that run the same pair launch the same collectives in the same
order. A computation is identified by the turn, not by its thread, because on GPUs autograd runs backward in a thread of
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from threading import Lock

import torch
from torch import Tensor

_active_turns: Turns | None = None
"""The pair of computations that is running now; None if there is none.

A global, because a collective inside autograd has no caller that could pass it on, and a context variable is lost where
autograd runs backward in a thread of its own.
"""


class Abandoned(Exception):
    """Raised in the waiting computation when the other failed; `Turns.take` raises the original error."""


def mark_sent() -> None:
    """Note that the running computation has a message in flight."""
    if _active_turns is not None:
        _active_turns.under_way[_active_turns.turn] = True


def hand_over() -> None:
    """Give the turn to the other computation, before the running one waits for a message that it has in flight."""
    if _active_turns is not None:
        _active_turns.hand_over()


def give_up() -> None:
    """Give the turn to the other computation. Called before the host waits for the device, as for counts.

    The first computation keeps its first turn: until its own messages are in flight, nothing that the second sends
    would be overlapped.
    """
    if _active_turns is not None and _active_turns.both_began:
        _active_turns.under_way[_active_turns.turn] = True
        _active_turns.hand_over()


def give_up_in_backward(x: Tensor) -> None:
    """Call `give_up` in backward, once the operation that made x has its gradient.

    Called for each `give_up` of a forward. Otherwise forward would have three turns a layer and backward two, and soon
    forward would get a turn in which it computes nothing each time backward has just sent its messages.
    """
    if not torch.compiler.is_compiling() and x.grad_fn is not None:
        x.grad_fn.register_hook(lambda *_: give_up())


class Turns:
    """Runs pairs of computations in turns, the second one in a thread that is made once."""

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext):
        """Make the thread. `waiting` returns a context that is entered while the other computation has the turn."""
        self.waiting = waiting
        # Kept: a new thread would make its own pool of OpenMP's, and its own handles of GPU libraries, for every pair.
        self.thread = ThreadPoolExecutor(1, "turns")

    def take(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both, starting with the first, which stays in this thread. Raise the error of one that fails."""
        global _active_turns
        self.turn, self.both_began = 0, False
        self.under_way, self.over = [False, False], [False, False]
        self.error: BaseException | None = None
        self.gates = Lock(), Lock()
        for gate in self.gates:
            gate.acquire()
        _active_turns = self
        # Options that the program set in torch are context variables, which a thread does not inherit.
        other = self.thread.submit(copy_context().run, self._play, 1, second)
        try:
            self._play(0, first)
        finally:
            other.result()
            _active_turns = None
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
            self._give(me)

    def _give(self, me: int) -> None:
        if not self.over[1 - me]:
            self.turn, self.both_began = 1 - me, True
            self.gates[1 - me].release()

    def hand_over(self) -> None:
        """Give the turn to the other computation, if the running one has a message in flight."""
        me = self.turn
        if not self.under_way[me]:
            return
        self.under_way[me] = False
        if not self.over[1 - me]:
            self.wait_for_turn(me)
        if self.error is not None:
            raise Abandoned("the other side of this pair failed")

    def wait_for_turn(self, me: int) -> None:
        """Give the turn to the other computation, and block until it is back."""
        with self.waiting():
            self._give(me)
            self.gates[me].acquire()
