"""Records the order of a program's events, and a clock that a test moves, so that results do not depend on speed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Event:
    """Named event with its positions in the program's order: of its begin, and of its end or -1."""

    name: str
    began: int
    ended: int = -1


class Events:
    """Recorder of named events in the program's order."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.open: dict[Hashable, Event] = {}
        self.places = 0

    def _place(self) -> int:
        self.places += 1
        return self.places

    def begin(self, name: str, key: Hashable) -> None:
        """Record the begin of an event that lasts until `end(key)`, as from issuing a collective to waiting for it."""
        self.open[key] = Event(name, self._place())
        self.all.append(self.open[key])

    def end(self, key: Hashable) -> None:
        self.open.pop(key).ended = self._place()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        self.begin(name, key := object())
        yield
        self.end(key)

    def of(self, name: str) -> list[Event]:
        return [event for event in self.all if event.name == name]

    def within(self, inner: str, outer: str) -> int:
        """Return how many events `inner` lie within an event `outer`. All `inner` must have ended; not checked."""
        around = [(event.began, event.ended) for event in self.of(outer)]
        return sum(any(a < event.began and event.ended < b for a, b in around) for event in self.of(inner))


class Clock:
    """Replacement of a module's `time` that moves when a test moves it, and by `tick` whenever it is read."""

    def __init__(self, tick: float = 0.0):
        self.now, self.tick = 0.0, tick

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    monotonic = perf_counter
