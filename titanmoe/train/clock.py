"""Where a step's time goes, part by part.

A GPU is behind the program, so there the marks are events on its stream: nobody waits for them, they are read once it
has passed them. On a CPU a mark is the time itself.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

import torch

from titanmoe.ops.region import OTHERS_TURN

PARTS = {"dispatch": "dispatch", "combine": "dispatch"}
"""The regions that are parts of a lap, and as which."""


class Clock:
    """`on` = False for ranks that do not report: a mark costs them nothing."""

    def __init__(self, device: torch.device, on: bool = True):
        self.on, self.gpu = on, device.type == "cuda"
        self._last: Any = None
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._seconds: Counter[str] = Counter()
        self._begun: dict[int, tuple[str, Any]] = {}  # by thread, the part it is in

    def lap(self, name: str) -> None:
        """What was done since the lap before was `name`. So laps add up to the whole."""
        if not self.on:
            return
        self._read()
        now = self._mark()
        if self._last is not None:
            self._open.append((name, self._last, now))
        self._last = now

    def region(self, name: str) -> AbstractContextManager[None] | None:
        """What the clock hears of regions."""
        if not self.on:
            return None
        if name == OTHERS_TURN:
            return self.away()
        return self.part(PARTS[name]) if name in PARTS else None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of some lap, counted apart; within a part nothing is."""
        me = get_ident()
        if me in self._begun:
            yield
            return
        self._begun[me] = name, self._mark()
        try:
            yield
        finally:
            self._open.append((*self._begun.pop(me), self._mark()))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Work of another thread: of no part that this one is in."""
        me = get_ident()
        begun = self._begun.pop(me, None)
        if begun is None:
            yield
            return
        self._open.append((*begun, self._mark()))
        try:
            yield
        finally:
            self._begun[me] = begun[0], self._mark()

    def take(self, steps: int) -> dict[str, float]:
        """Seconds of each part, per step, since the last call `steps` ago, as far as the device has come."""
        self._read()
        seconds, self._seconds = self._seconds, Counter()
        return {name: total / steps for name, total in seconds.items()}

    def _read(self) -> None:
        while self._open and (not self.gpu or self._open[0][2].query()):
            name, begin, end = self._open.popleft()
            self._seconds[name] += begin.elapsed_time(end) / 1e3 if self.gpu else end - begin

    def _mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
