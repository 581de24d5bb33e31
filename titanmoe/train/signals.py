"""On SIGTERM or SIGINT a run that saves checkpoints finishes its step, saves and ends."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from titanmoe.train.runtime import say

AGAIN_S = 3.0
"""A terminal's Ctrl-C reaches a rank twice, directly and through torchrun. A second one counts only after this time."""


class Signals:
    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
            again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
            say(f"{signal.Signals(number).name}: saving after this step, then ending{again}")
        elif number == signal.SIGINT and time.monotonic() - self._since > AGAIN_S:
            raise KeyboardInterrupt
