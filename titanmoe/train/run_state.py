"""How far a run has come, and which of its steps made no update.

With the tensors and the loader's place, this is what a resumed run needs. An update is skipped whose loss or gradient
norm is not finite, or far above those of the steps before. The rule is that of OLMo-core's SkipStepOptimizer
(https://github.com/allenai/OLMo-core), except that a fall is fine and skipped steps do not count towards the mean.
Every rank has the same two numbers, so all decide alike.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from titanmoe.config.schema import Optimizer as Options
from titanmoe.train.checks import NumericalFault

USUAL = 6.0
"""How many standard deviations above the mean make a step suspect, if skip_spikes is not set."""
LEAST = 1e-3
"""The deviation counts as at least this fraction of the mean; otherwise it is almost zero when values hardly change."""


class Skips:
    """The rule by which steps make no update, and how many it has skipped."""

    def __init__(self, options: Options):
        self.options = options
        self.before = {name: deque[float](maxlen=options.skip_window) for name in ("loss", "gradient norm")}
        self.skipped = 0
        """Steps of the run without an update, for any reason."""
        self.in_a_row = 0
        """How many of the latest steps this rule has skipped without a break."""

    def why(self, loss: float, norm: float, sigmas: float) -> str:
        """What is wrong with these two; "" if nothing. sigmas: how many deviations above the mean are too many."""
        for (name, before), value in zip(self.before.items(), (loss, norm), strict=True):
            if not math.isfinite(value):
                return f"{name} {value}"
            if len(before) >= self.options.skip_window // 2:
                mean = fmean(before)
                deviation = max(math.sqrt(fmean((x - mean) ** 2 for x in before)), LEAST * abs(mean))
                if value > mean + sigmas * deviation:
                    above = f"{(value - mean) / deviation:.3g} deviations above {mean:.5g}"
                    return f"{name} {value:.5g}, which is {above}, the mean of the {len(before)} steps before"
        return ""

    def skip(self) -> None:
        self.skipped += 1
        self.in_a_row += 1

    def accept(self, loss: float, norm: float) -> None:
        self.in_a_row = 0
        for before, value in zip(self.before.values(), (loss, norm), strict=True):
            before.append(value)

    def check_limit(self, step: int, why: str) -> None:
        if self.in_a_row >= self.options.skip_limit:
            raise NumericalFault(
                f"step {step}: {self.in_a_row} updates in a row were skipped (optimizer.skip_limit), the last because "
                f"of {why}. The weights are as the last update left them. Lower optimizer.lr, look at these steps' "
                "samples in events.jsonl, or accept such numbers with a larger optimizer.skip_spikes."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "before": {k: [*v] for k, v in self.before.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """state: {} from a run without this rule."""
        self.skipped, self.in_a_row = int(state.get("skipped", 0)), int(state.get("in_a_row", 0))
        for name, before in self.before.items():
            before.clear()
            before.extend(map(float, state.get("before", {}).get(name, ())))


@dataclass
class RunState:
    """How far a run has come."""

    skips: Skips
    step: int = 0
    tokens: float = 0.0
    """How many were trained on so far, on all ranks, without padding."""

    @property
    def updates(self) -> int:
        return self.step - self.skips.skipped
