"""The best step of a run, by a metric of its validation or quiz: its checkpoint is kept, and the run may end after it.

The best value so far and the number of evaluations without a better one are part of every checkpoint, so a run that
resumes, under any mapping, keeps and stops as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanmoe import observe
from titanmoe.config.schema import Config

DEFAULT = "val_loss"
"""Metric of a run that names none."""


@dataclass(eq=False)
class BestStep:
    """The step with the best value of a metric so far, for checkpoint.keep_best and training.stop_after."""

    metric: str
    """Name of the metric, as in metrics.jsonl."""
    keeps: bool
    """Whether the best step's checkpoint is saved and kept (checkpoint.keep_best)."""
    stop_after: int
    """Number of evaluations in a row without a better value after which the run ends; 0: it does not."""
    value: float = math.nan
    """Value of the metric after the best step; NaN while no evaluation has given a number."""
    step: int = -1
    """The best step; -1 while no evaluation has given a number."""
    without_gain: int = 0
    """Number of evaluations since the best step."""

    @classmethod
    def of(cls, config: Config) -> BestStep | None:
        """Return a tracker of the metric that checkpoint.keep_best names, else of "val_loss".

        None if neither checkpoint.keep_best nor training.stop_after is set.
        """
        keep_best, stop_after = config.checkpoint.keep_best, config.training.stop_after
        return cls(keep_best or DEFAULT, bool(keep_best), stop_after) if keep_best or stop_after else None

    def after_step(self, step: int, report: Mapping[str, Any]) -> None:
        """Store a step's metric in `value` and `step` if it is better than the best, else add 1 to `without_gain`.

        A step that does not report the metric changes nothing. NaN is never better. While there is no best step, each
        evaluation of the metric's kind (validation or quiz) without it writes a "best" event.

        Args:
            step: number of the step.
            report: the step's metrics, the same on all ranks.
        """
        if self.metric not in report:
            evaluated = [name for name in report if _evaluation(name) == _evaluation(self.metric)]
            if evaluated and self.step < 0:
                names = ", ".join(sorted(evaluated))
                text = f"checkpoint.keep_best: there is no metric {self.metric}; the evaluations report {names}"
                observe.active.event(step, "best", text)
            return
        value = float(report[self.metric])
        is_better = value > self.value if higher_is_better(self.metric) else value < self.value
        if is_better or (self.step < 0 and not math.isnan(value)):
            self.value, self.step, self.without_gain = value, step, 0
        else:
            self.without_gain += 1

    @property
    def stops(self) -> bool:
        """True if the run ends because the metric has not improved in training.stop_after evaluations in a row."""
        return 0 < self.stop_after <= self.without_gain

    def describe(self) -> str:
        """Return the best value and its step as text, such as "val_loss 2.1034 at step 1,200"."""
        return f"{self.metric} {self.value:.4f} at step {self.step:,}"

    def why_stopped(self) -> str:
        """Return a text for the user on why the run ends: how many evaluations have not improved on which value."""
        if self.step < 0:
            return f"{self.metric} was NaN in {self.without_gain} evaluations (training.stop_after)"
        return (
            f"{self.without_gain} evaluations (training.stop_after) have not improved on {self.metric} "
            f"{self.value:.4f} of step {self.step:,}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the tracker's state for a checkpoint's manifest: "metric", "value", "step" and "without_gain".

        "value" is None while no evaluation has given a number.
        """
        return {
            "metric": self.metric,
            "value": None if math.isnan(self.value) else self.value,
            "step": self.step,
            "without_gain": self.without_gain,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint's manifest stores; forget the best step if that is of another metric or {}."""
        self.value, self.step, self.without_gain = math.nan, -1, 0
        if state.get("metric") == self.metric:
            self.without_gain = state["without_gain"]
            if state["value"] is not None:
                self.value, self.step = float(state["value"]), state["step"]


def _evaluation(metric: str) -> str:
    """Return which evaluation reports a metric, "validation" or "quiz"; "" for one of a training step."""
    if metric.startswith("quiz."):
        return "quiz"
    return "validation" if metric.startswith("val_") or ".val_" in metric else ""


def higher_is_better(metric: str) -> bool:
    """Return whether a metric is better the higher it is: accuracies, margins and rewards are, losses not."""
    return "accuracy" in metric or metric.endswith(("margin", "reward"))
