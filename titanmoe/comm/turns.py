"""Two computations that take turns on one device: while one waits for what it has sent, the other computes.

Each has its own stack, in a thread of its own, and one of them runs at a time. It yields where it would wait for rows
that it has sent since its turn began, and where its host would wait for counts. So the order of everything the two
launch follows from the two programs, and ranks that run the same pair launch the same collectives in the same order.
Whoever runs has the turn: the thread does not identify it, because on GPUs autograd runs backward in a thread of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from threading import Lock

import torch
from torch import Tensor

_running: Turns | None = None
"""The pair that is running now. A global, because a collective inside autograd has no caller that could pass it on, and
a context variable stays behind where autograd runs backward in a thread of its own."""


class Abandoned(Exception):
    """Raised in the waiting side when the other failed; `take` raises the original failure."""


def mark_sent() -> None:
    """Whoever has the turn has sent something."""
    if _running is not None:
        _running.under_way[_running.turn] = True


def hand_over() -> None:
    """Whoever has the turn would now wait for what it has sent."""
    if _running is not None:
        _running.hand_over()


def give_up() -> None:
    """The host of whoever has the turn would now wait, for something other than rows. The first side keeps its first
    turn here: until its own rows are in flight, nothing that the second side sends would be covered."""
    if _running is not None and _running.both_began:
        _running.under_way[_running.turn] = True
        _running.hand_over()


def give_up_in_backward(x: Tensor) -> None:
    """`give_up` in backward, once the operation that made x has passed its gradient on.

    For each `give_up` of a forward. Otherwise forward would have three turns a layer and backward two, and soon forward
    would take a turn in which it computes nothing each time backward has just sent its rows.
    """
    if not torch.compiler.is_compiling() and x.grad_fn is not None:
        x.grad_fn.register_hook(lambda *_: give_up())


class Turns:
    def __init__(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext):
        """waiting: entered for as long as the other has the turn."""
        self.waiting = waiting
        # Kept: a new thread would make its own pool of OpenMP's, and its own handles of GPU libraries, for every pair.
        self.thread = ThreadPoolExecutor(1, "turns")

    def take(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Runs both, starting with the first, which stays in this thread; raises the error of one that fails."""
        global _running
        self.turn, self.both_began = 0, False
        self.under_way, self.over = [False, False], [False, False]
        self.error: BaseException | None = None
        self.gates = Lock(), Lock()
        for gate in self.gates:
            gate.acquire()
        _running = self
        # Options that the program set in torch are context variables, which a thread does not inherit.
        other = self.thread.submit(copy_context().run, self._play, 1, second)
        try:
            self._play(0, first)
        finally:
            other.result()
            _running = None
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
        me = self.turn
        if not self.under_way[me]:
            return
        self.under_way[me] = False
        if not self.over[1 - me]:
            self.wait_for_turn(me)
        if self.error is not None:
            raise Abandoned("the other side of this pair failed")

    def wait_for_turn(self, me: int) -> None:
        with self.waiting():
            self._give(me)
            self.gates[me].acquire()
