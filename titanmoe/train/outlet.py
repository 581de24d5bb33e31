"""Where a run writes its metrics and events. If one fails, the run goes on and tries it again later."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from titanmoe.checkpoint import safe_files

PAUSE_S, LONGEST_S = 30.0, 600.0
"""Seconds until a failed outlet is tried again; doubled each time it fails again, up to the longest."""


class Closes(Protocol):
    def close(self) -> None: ...


P = TypeVar("P", bound=Closes)


class Outlet(Generic[P]):
    """One file or service, reopened after a failure. warn(text) is called when it fails and when it works again."""

    def __init__(self, name: str, make: Callable[[], P], warn: Callable[[str], None]):
        self.name, self.make, self.warn = name, make, warn
        self.opened: P | None = None
        self.lost = 0
        self._pause, self._again = 0.0, 0.0  # no pause: it works

    def open(self) -> None:
        """Open it at the start, when only errors of the disk are tolerated: the user can fix others at once."""
        try:
            self.opened = self.make()
        except OSError as error:
            self._failed(error)

    def put(self, write: Callable[[P], None]) -> None:
        if self._pause and time.monotonic() < self._again:
            self.lost += 1
            return
        try:
            if self.opened is None:
                self.opened = self.make()
            write(self.opened)
        except Exception as error:  # TensorBoard and Weights & Biases raise anything
            self.lost += 1
            self._failed(error)
            return
        if self._pause:
            lost, self.lost, self._pause = self.lost, 0, 0.0
            self.warn(f"{self.name}: works again; {lost} line{'s were' if lost != 1 else ' was'} lost")

    def _failed(self, error: Exception) -> None:
        self.close()
        first, self._pause = not self._pause, min(2 * self._pause, LONGEST_S) or PAUSE_S
        self._again = time.monotonic() + self._pause
        if first:
            why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            self.warn(
                f"{self.name}: {why}: the run goes on without it and tries again in {PAUSE_S:g} s, then less often"
            )

    def close(self) -> None:
        if self.opened is not None:
            with contextlib.suppress(Exception):
                self.opened.close()
            self.opened = None


class LineFile:
    """Whole lines, handed to the kernel when write returns; a line that does not fit leaves nothing behind."""

    def __init__(self, path: Path):
        self.descriptor = safe_files.open_in(path.parent, path.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

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
