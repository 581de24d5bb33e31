"""Where a run writes what it tells. A place that fails is left alone for a while, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

PAUSE_S, LONGEST_S = 30.0, 600.0
"""How long a place that failed is left alone; twice as long each time that it fails again."""


class Closes(Protocol):
    def close(self) -> None: ...


P = TypeVar("P", bound=Closes)


class Outlet(Generic[P]):
    """One place, opened anew after it failed. tell(text) hears when it fails, and when it is back."""

    def __init__(self, name: str, make: Callable[[], P], tell: Callable[[str], None]):
        self.name, self.make, self.tell = name, make, tell
        self.place: P | None = None
        self.lost = 0
        self._pause, self._again = 0.0, 0.0  # no pause: it works

    def open(self) -> None:
        """At the start, when only the disk is forgiven: what else is wrong can be mended at once."""
        try:
            self.place = self.make()
        except OSError as error:
            self._failed(error)

    def put(self, write: Callable[[P], None]) -> None:
        if self._pause and time.monotonic() < self._again:
            self.lost += 1
            return
        try:
            if self.place is None:
                self.place = self.make()
            write(self.place)
        except Exception as error:  # TensorBoard and Weights & Biases raise what they like
            self.lost += 1
            self._failed(error)
            return
        if self._pause:
            lost, self.lost, self._pause = self.lost, 0, 0.0
            self.tell(f"{self.name}: written again; {lost} line{'s' * (lost != 1)} of it were lost")

    def _failed(self, error: Exception) -> None:
        self.close()
        first, self._pause = not self._pause, min(2 * self._pause, LONGEST_S) or PAUSE_S
        self._again = time.monotonic() + self._pause
        if first:
            why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            self.tell(
                f"{self.name}: {why}: the run goes on without it and tries again in {PAUSE_S:g} s, then more seldom"
            )

    def close(self) -> None:
        if self.place is not None:
            with contextlib.suppress(Exception):
                self.place.close()
            self.place = None


class LineFile:
    """Whole lines, in the kernel's hands when write returns; nothing is left of one that does not fit."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, line: str) -> None:
        data, size = line.encode() + b"\n", os.fstat(self.descriptor).st_size
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, size)
            raise

    def close(self) -> None:
        os.close(self.descriptor)
