"""Where a step's time goes, part by part.

A GPU runs behind the program, so there the marks are events on its stream, which are read once the GPU has passed them
and never waited for. On a CPU a mark is simply the time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

import torch

from titanmoe.ops.region import OTHERS_TURN

PARTS = {"dispatch": "dispatch", "combine": "dispatch"}
"""The regions that the clock measures, and the part that each counts towards."""


class Clock:
    """`on` = False on ranks that do not report, where marks cost nothing."""

    def __init__(self, device: torch.device, on: bool = True):
        self.on, self.gpu = on, device.type == "cuda"
        self._last: Any = None
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._seconds: Counter[str] = Counter()
        self._begun: dict[int, tuple[str, Any]] = {}  # the part that each thread is in
        self.listener: Callable[[str], None] | None = None
        """Called with the name of every lap, on every rank."""

    def lap(self, name: str) -> None:
        """The time since the last lap went into `name`. So laps add up to the whole."""
        if self.listener is not None:
            self.listener(name)
        if not self.on:
            return
        self._read()
        now = self._mark()
        if self._last is not None:
            self._open.append((name, self._last, now))
        self._last = now

    def region(self, name: str) -> AbstractContextManager[None] | None:
        """Called when a region is entered (`titanmoe.ops.region.RegionListener`)."""
        if not self.on:
            return None
        if name == OTHERS_TURN:
            return self.away()
        return self.part(PARTS[name]) if name in PARTS else None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a lap that is also measured on its own; parts inside it are not."""
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
        """Work of another thread, which does not count towards this thread's part."""
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
        """Seconds of each part, per step, since the last call `steps` steps ago, as far as the device has run."""
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
