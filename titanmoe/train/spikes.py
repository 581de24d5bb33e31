"""Loss spikes, by a rule that an outlier does not move: far above the median of the steps before."""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 64
ENOUGH = 16
"""Steps that are needed to know what is usual."""
TIMES = 6.0
"""How many robust standard deviations (1.4826 * median absolute deviation) above the median is a spike."""
LEAST = 0.02
"""A deviation is at least this part of the median: a loss that hardly moves has none to speak of."""


class Spikes:
    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=WINDOW)
        self.high = False

    def check(self, loss: float) -> str:
        """What is to be said of it: a spike is told once, on its first step."""
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
