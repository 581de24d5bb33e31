"""Loss spikes, found by a rule that is robust to outliers: far above the median of the steps before."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 64
ENOUGH = 16
"""Number of steps needed to know what is usual."""
TIMES = 6.0
"""A spike is this many robust standard deviations (1.4826 * median absolute deviation) above the median."""
LEAST = 0.02
"""The deviation is at least this fraction of the median: that of a loss that hardly moves is almost zero."""


class Spikes:
    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=WINDOW)
        self.high = False

    def check(self, loss: float) -> str:
        """The text of the event, "" for none: a spike is reported once, at its first step."""
        if not math.isfinite(loss):  # a step that was skipped; the median of a NaN is anything
            return ""
        text, was_high, self.high = "", self.high, False
        if len(self.before) >= ENOUGH:
            median = statistics.median(self.before)
            deviation = 1.4826 * statistics.median(abs(value - median) for value in self.before)
            deviation = max(deviation, LEAST * abs(median))
            self.high = loss > median + TIMES * deviation
            if self.high and not was_high:
                text = (
                    f"loss {loss:.4f} is {(loss - median) / deviation:.0f} deviations above {median:.4f}, "
                    f"the median of the {len(self.before)} steps before"
                )
        self.before.append(loss)
        return text
