"""Two computations that take turns on one device: while one waits for what it has sent, the other computes.

Each has its own stack, in a thread of its own, and one of them runs at a time. It hands over where it would wait for
rows that it has sent since it last did. So the order of everything the two launch follows from what they are, and ranks
that run the same pair launch the same collectives in the same order. Whoever runs has the turn: threads tell nothing,
because on GPUs autograd runs backward in one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from threading import Lock

_running: Turns | None = None
"""Of the pair that runs now: a collective inside autograd knows of no caller that could hand it down."""


class Abandoned(Exception):
    """Raised in the side that waited when the other failed; what `take` raises is that failure."""


def sent() -> None:
    """Whoever has the turn has put something under way."""
    if _running is not None:
        _running.under_way[_running.turn] = True


def hand_over() -> None:
    """Whoever has the turn would now wait for what is under way."""
    if _running is not None:
        _running.hand_over()


class Turns:
    def __init__(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext):
        """waiting: entered for as long as the other has the turn."""
        self.waiting = waiting
        # Kept: a new thread would make its own pool of OpenMP's, and its own handles of GPU libraries, for every pair.
        self.thread = ThreadPoolExecutor(1, "turns")

    def take(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Both, beginning with the first, which stays in this thread; the error of the one that fails, if one does."""
        global _running
        self.turn = 0
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
        if self.turn == me:  # an interrupt may come to the one that waits
            self._give(me)

    def _give(self, me: int) -> None:
        if not self.over[1 - me]:
            self.turn = 1 - me
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
