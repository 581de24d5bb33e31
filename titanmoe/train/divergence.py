"""A loss that flies away, or stays above that of a guess: reported once it has lasted, and again when it is over.

A healthy loss falls, wobbles from batch to batch, and has spikes of a few steps. It is too high if, STEPS in a row, it
is over the lower of two limits:

* FIRST nats above that of the run's first step. Nothing that works makes a model 2.7 times as perplexed as it was
  before its first update, and a fine-tune that starts low and wobbles by a few tenths stays below.
* LOWEST nats above its lowest average so far, 7.4 times as perplexed. A spike and the way back from it are shorter;
  batches of unlike sources differ by less; a model that falls back to counting tokens does so by more.

It is so at once if it is FAR nats over them twice in a row: a single batch does that, not two.

Or if, GUESSED steps in a row after the warm-up, it is over ln(vocab_size), that of a uniform guess: how often each
token occurs is learnt within the first steps, and alone worth several nats. Random tokens (data.source = "synthetic")
have nothing to learn, so this rule is off for them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FIRST, LOWEST, FAR = 1.0, 2.0, 10.0
STEPS, GUESSED, TWICE = 16, 50, 2


class Expected(NamedTuple):
    """What is known of a run's loss before it begins."""

    warmup: int
    """lr_schedule.warmup_steps"""
    lr: float
    """optimizer.lr"""
    guess: float
    """The loss of a uniform guess; infinite if there is nothing to learn."""


class Divergence:
    def __init__(self, expected: Expected):
        self.warmup, self.guess = expected.warmup, expected.guess
        self.advice = (
            f"lower optimizer.lr ({expected.lr:g}) or raise lr_schedule.warmup_steps ({self.warmup}), and "
            "begin again, or from a checkpoint of before (checkpoint.load = its step)"
        )
        self.first: float | None = None
        self.lowest, self.highest = math.inf, 0.0
        self.over, self.far, self.guessing, self.calm = 0, 0, 0, 0
        """Losses in a row over a limit, far over it, over a guess, and below both."""
        self.begun = 0
        """The first step of those that are not calm."""
        self.text = ""
        """What is wrong, for as long as it is."""

    def check(self, step: int, loss: float, smoothed: float) -> str:
        """The text of an event, "" for none."""
        if not math.isfinite(loss):  # a step that was skipped
            return ""
        self.first = loss if self.first is None else self.first
        limit = min(self.first + FIRST, self.lowest + LOWEST)
        over = loss > limit
        guessing = loss > self.guess and step > self.warmup
        self.lowest = min(self.lowest, smoothed)
        self.over = self.over + 1 if over else 0
        self.far = self.far + 1 if loss > limit + FAR else 0
        self.guessing = self.guessing + 1 if guessing else 0
        if not (over or guessing):
            self.calm, self.highest, self.begun = self.calm + 1, 0.0, 0
        else:
            self.calm, self.highest, self.begun = 0, max(self.highest, loss), self.begun or step
        if self.text:
            if self.calm < STEPS:
                return ""
            self.text = ""
            return f"the loss has come back to {loss:.4g}"
        if self.over >= STEPS or self.far >= TWICE:
            known = f"it was {self.first:.4g} at the first step"
            if self.lowest < 0.99 * self.first:
                known += f", and {self.lowest:.4g} on average at its lowest"
        elif self.guessing >= GUESSED:
            known = f"a uniform guess has {self.guess:.4g}"
        else:
            return ""
        self.text = f"since step {self.begun:,} the loss is far too high, up to {self.highest:.4g}: {known}"
        return f"{self.text}: {self.advice}"
