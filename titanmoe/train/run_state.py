"""The steps and tokens of a run so far, and the rule that skips updates (optimizer.skip_spikes).

A resumed run needs this, the tensors, and the loader's position. An update is skipped if its loss or gradient norm is
not finite, or far above the mean of recent steps. The rule is that of OLMo-core's SkipStepOptimizer
(https://github.com/allenai/OLMo-core), except that low values are never skipped and skipped steps do not count towards
the mean. Loss and norm are the same on all ranks, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from titanmoe.config.schema import Optimizer as Options

DEFAULT_SIGMAS = 6.0
"""Standard deviations above the mean from which a step is suspect, if optimizer.skip_spikes is not set."""
MIN_DEVIATION = 1e-3
"""Smallest standard deviation assumed, as a fraction of the mean: that of values that hardly change is almost 0."""


class SkipRule:
    """Rule that decides which steps make no update (optimizer.skip_spikes), and counts of all steps without one."""

    def __init__(self, options: Options):
        self.options = options
        self.before = {name: deque[float](maxlen=options.skip_window) for name in ("loss", "gradient norm")}
        self.skipped = 0
        """Number of steps of the run without an update, for any reason, such as data.skip_steps."""
        self.in_a_row = 0
        """Number of consecutive steps up to now that this rule has skipped."""
        self.judges_loss = True
        """Whether a step is judged by its loss too, not by its gradient norm alone. A loss must be finite anyway."""

    def find_outlier(self, loss: float, norm: float, sigmas: float) -> str:
        """Return a text on what is unusual about a step's loss or gradient norm; "" if nothing is.

        A value that is not finite always is. The mean counts only once half of optimizer.skip_window steps are known,
        and that of the loss only with `judges_loss`. Records nothing.

        Args:
            sigmas: number of standard deviations above the mean of recent steps from which a value is unusual.
        """
        for (name, before), value in zip(self.before.items(), (loss, norm), strict=True):
            if not math.isfinite(value):
                return f"{name} {value}"
            if len(before) >= self.options.skip_window // 2 and (self.judges_loss or name != "loss"):
                mean = fmean(before)
                deviation = max(math.sqrt(fmean((x - mean) ** 2 for x in before)), MIN_DEVIATION * abs(mean))
                if value > mean + sigmas * deviation:
                    above = f"{(value - mean) / deviation:.3g} deviations above {mean:.5g}"
                    return f"{name} {value:.5g}, which is {above}, the mean of the {len(before)} steps before"
        return ""

    def accept(self, loss: float, norm: float) -> None:
        """Add the loss and gradient norm of a step that makes an update to those of recent steps; reset `in_a_row`."""
        self.in_a_row = 0
        for before, value in zip(self.before.values(), (loss, norm), strict=True):
            before.append(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers to store in a checkpoint under "skips": counts, and losses and norms of recent steps."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "before": {k: [*v] for k, v in self.before.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers that a checkpoint stores under "skips"; {} stands for a run that skipped nothing."""
        self.skipped, self.in_a_row = int(state.get("skipped", 0)), int(state.get("in_a_row", 0))
        for name, before in self.before.items():
            before.clear()
            before.extend(map(float, state.get("before", {}).get(name, ())))


@dataclass
class RunState:
    """Progress of a run: its steps and tokens so far."""

    skips: SkipRule
    step: int = 0
    tokens: float = 0.0
    """Tokens trained on so far, summed over all ranks, without padding."""

    @property
    def updates(self) -> int:
        """Number of steps that changed the weights: not those that data.skip_steps or optimizer.skip_spikes skipped."""
        return self.step - self.skips.skipped
