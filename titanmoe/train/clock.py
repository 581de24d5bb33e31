"""Measures where the time of a step goes.

A GPU runs behind the program, so there the marks are events on its stream, which are read once the GPU has passed them
and never waited for. On a CPU a mark is simply the time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

import torch

from titanmoe.observe import OTHERS_TURN, Observer

PARTS = {"dispatch": "dispatch", "combine": "dispatch"}
"""The regions that the clock measures, and the part that each counts towards."""


class Clock(Observer):
    """Measures the phases of a step and, in forward and backward, some regions; on the rank that reports."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        self._phase: tuple[str, Any] | None = None
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._seconds: Counter[str] = Counter()
        self._begun: dict[int, tuple[str, Any]] = {}  # the part that each thread is in

    def phase(self, name: str, step: int) -> None:
        """Each phase lasts until the next, so they add up to the whole."""
        self._read()
        now = self._mark()
        if self._phase is not None:
            self._open.append((*self._phase, now))
        self._phase = name, now

    def region(self, name: str) -> AbstractContextManager[None] | None:
        if self._phase is None or self._phase[0] != "forward_backward":
            return None
        if name == OTHERS_TURN:
            return self.away()
        return self.part(PARTS[name]) if name in PARTS else None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a phase that is also measured on its own; parts inside it are not."""
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
