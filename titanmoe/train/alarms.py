"""Alarms on losses and expert loads that rank 0 writes as events: loss spikes, dying experts, divergence.

`titanmoe.train.metrics` asks each of them after every step. An alarm is written once, when its condition has lasted.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.balance_losses.balance_spec import active_losses

WINDOW = 64
"""Number of recent losses that a spike is compared with."""
MIN_LOSSES = 16
"""Number of losses needed before a spike can be detected."""
SPIKE_DEVIATIONS = 6.0
"""Robust standard deviations (1.4826 * median absolute deviation) above the median from which a loss is a spike."""
MIN_DEVIATION = 0.02
"""Smallest deviation assumed, as a fraction of the median: that of a loss that hardly changes is almost 0."""


class SpikeAlarm:
    """Detector of loss spikes: a loss far above the median of recent losses, a rule that is robust to outliers."""

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=WINDOW)
        self.high = False

    def check(self, loss: float) -> str:
        """Add the loss of a step; return the text of a "spike" event, or "".

        A spike is over SPIKE_DEVIATIONS (6) robust deviations, each of at least 2 % of the median, above the median of
        the WINDOW (64) losses before. One that lasts several steps is reported once, at the first, and none in the
        first MIN_LOSSES (16) steps. A loss that is not finite is ignored.
        """
        if not math.isfinite(loss):  # the step was skipped; a NaN would make the median meaningless
            return ""
        text, was_high, self.high = "", self.high, False
        if len(self.before) >= MIN_LOSSES:
            median = statistics.median(self.before)
            deviation = 1.4826 * statistics.median(abs(value - median) for value in self.before)
            deviation = max(deviation, MIN_DEVIATION * abs(median))
            self.high = loss > median + SPIKE_DEVIATIONS * deviation
            if self.high and not was_high:
                text = (
                    f"loss {loss:.4f} is {(loss - median) / deviation:.0f} deviations above {median:.4f}, "
                    f"the median of the {len(self.before)} steps before"
                )
        self.before.append(loss)
        return text


REPORT_STEPS = 50
"""Consecutive steps after which an imbalance or a dying expert is reported; one bad batch does not count."""
COLLAPSE_STEPS = 10
"""Consecutive steps after which the greatest possible imbalance, to within 1 %, is reported."""
DYING_FRACTION = 0.01
"""Fraction of the mean load below which an expert is dying."""
ADVICE = "moe.bias_update_rate = 0.001 or moe.aux_loss = 0.01 balances them, moe.z_loss keeps router logits small"


def warn_of_no_balancing(model: Model, moe: MoE) -> str:
    """Return a warning if no balance loss and no selection bias keeps the experts evenly loaded; else "".

    No warning either if the model has no choice of experts, or moe.force_balance is set. The text is printed in the
    table of settings at the start of a run.
    """
    balanced = moe.bias_update_rate or any(term.spec.evens_loads for term in active_losses(moe))
    a_choice = moe_blocks(model) and model.num_experts > model.top_k
    if not a_choice or moe.force_balance or balanced:
        return ""
    return "none: nothing keeps the experts evenly busy, and some may die; " + ADVICE.partition(",")[0]


class LoadAlarm:
    """Detector of dying experts, and of routing that collapses onto a few experts."""

    def __init__(self, num_experts: int, top_k: int):
        self.greatest = num_experts / top_k
        """Greatest possible imbalance, reached when all tokens choose the same experts."""
        self.limit = max(2.0, self.greatest / 2)
        self._dying: dict[int, Counter[int]] = {}
        self._uneven: Counter[int] = Counter()
        self._collapsed: Counter[int] = Counter()

    def check(self, loads: dict[int, list[float]]) -> Iterator[str]:
        """Add the loads of a step; yield a text for each "collapse" event, such as a dying expert or very uneven loads.

        An expert is dying below 1 % of the mean load; loads are uneven if the busiest expert has over `limit` times the
        mean: half of the greatest possible ratio, at least 2. A text comes once each time that this has lasted for
        REPORT_STEPS (50) steps, or COLLAPSE_STEPS (10) if all tokens choose the same experts. A layer's loads are added
        when the iterator comes to it, so the caller goes on to the end.

        Args:
            loads: by number of the block, how many tokens each of all experts received in this step, over all ranks.
        """
        for layer, load in loads.items():
            mean = sum(load) / len(load)
            before, now = self._dying.get(layer, Counter()), Counter()
            for expert, tokens in enumerate(load):
                if tokens < DYING_FRACTION * mean:
                    now[expert] = before[expert] + 1
            self._dying[layer] = now
            if dead := [expert for expert, steps in now.items() if steps == REPORT_STEPS]:
                many = "experts" if len(dead) > 1 else "expert"
                names = ", ".join(map(str, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
                yield (
                    f"layer {layer}: {many} {names} got under {DYING_FRACTION:.0%} of the mean load for {REPORT_STEPS} "
                    f"steps; {ADVICE}"
                )
            collapsed = 0 < 0.99 * self.greatest * mean <= max(load) and self.greatest > 1
            self._collapsed[layer] = self._collapsed[layer] + 1 if collapsed else 0
            if self._collapsed[layer] == COLLAPSE_STEPS:
                yield (
                    f"layer {layer}: all tokens have chosen the same expert for {COLLAPSE_STEPS} steps, "
                    f"{self.greatest:.1f} times the mean load, which is the greatest possible: the routing has "
                    f"collapsed. Lower optimizer.lr and start again, or continue from an earlier checkpoint; {ADVICE}"
                )
            uneven = mean > 0 and max(load) > self.limit * mean
            self._uneven[layer] = self._uneven[layer] + 1 if uneven else 0
            if self._uneven[layer] == REPORT_STEPS and not collapsed:
                ratio = max(load) / mean
                yield (
                    f"layer {layer}: the busiest expert had over {self.limit:g} times the mean load for {REPORT_STEPS} "
                    f"steps, now {ratio:.1f} times; {ADVICE}"
                )


ABOVE_FIRST, ABOVE_LOWEST, FAR_ABOVE = 1.0, 2.0, 10.0
HIGH_STEPS, GUESS_STEPS, FAR_STEPS = 16, 50, 2


class ExpectedLoss(NamedTuple):
    """Facts of the recipe that the divergence alarm needs."""

    warmup: int
    """Steps of the warmup (lr_schedule.warmup_steps)."""
    lr: float
    """Peak learning rate (optimizer.lr)."""
    guess: float
    """Loss of a uniform guess; infinite if there is nothing to learn."""


class DivergenceAlarm:
    """Detector of a loss that diverges, or that stays above the loss of a uniform guess.

    A healthy loss falls, varies from batch to batch, and has spikes of a few steps. It diverges if for HIGH_STEPS in a
    row it exceeds the lower of two limits, or for FAR_STEPS exceeds it by FAR_ABOVE nats:

    * ABOVE_FIRST nats above the first loss; a fine-tune that starts low and varies by a few tenths stays below.
    * ABOVE_LOWEST nats above the lowest average so far; spikes are shorter, and batches of sources differ by less.

    GUESS_STEPS in a row after the warm-up above ln(vocab_size) count too: token frequencies are learnt within the first
    steps. This rule is off for random tokens (data.source = "synthetic").
    """

    def __init__(self, expected: ExpectedLoss):
        self.warmup, self.guess = expected.warmup, expected.guess
        self.advice = (
            f"lower optimizer.lr ({expected.lr:g}) or raise lr_schedule.warmup_steps ({self.warmup}), and "
            "start again, or continue from an earlier checkpoint (checkpoint.load = its step)"
        )
        self.first: float | None = None
        self.lowest, self.highest = math.inf, 0.0
        self.over, self.far, self.guessing, self.calm = 0, 0, 0, 0
        """Numbers of consecutive losses over the limit, far over it, over a uniform guess, and over none of these."""
        self.begun = 0
        """First step of the current series of losses that are too high; 0 if there is none."""
        self.text = ""
        """Text of the alarm while it lasts, else ""."""

    def check(self, step: int, loss: float, smoothed: float) -> str:
        """Add the loss of a step; return the text of a "divergence" event, or "".

        An event is returned once when the loss has become too high, and once when it has recovered; `text` is not ""
        in between. A loss that is not finite is ignored.

        Args:
            smoothed: running average of the loss, this step's included.
        """
        if not math.isfinite(loss):  # the step was skipped
            return ""
        self.first = loss if self.first is None else self.first
        limit = min(self.first + ABOVE_FIRST, self.lowest + ABOVE_LOWEST)
        over = loss > limit
        guessing = loss > self.guess and step > self.warmup
        self.lowest = min(self.lowest, smoothed)
        self.over = self.over + 1 if over else 0
        self.far = self.far + 1 if loss > limit + FAR_ABOVE else 0
        self.guessing = self.guessing + 1 if guessing else 0
        if not (over or guessing):
            self.calm, self.highest, self.begun = self.calm + 1, 0.0, 0
        else:
            self.calm, self.highest, self.begun = 0, max(self.highest, loss), self.begun or step
        if self.text:
            if self.calm < HIGH_STEPS:
                return ""
            self.text = ""
            return f"the loss has recovered to {loss:.4g}"
        if self.over >= HIGH_STEPS or self.far >= FAR_STEPS:
            known = f"it was {self.first:.4g} at the first step"
            if self.lowest < 0.99 * self.first:
                known += f", and {self.lowest:.4g} on average at its lowest"
        elif self.guessing >= GUESS_STEPS:
            known = f"a uniform guess has {self.guess:.4g}"
        else:
            return ""
        self.text = f"since step {self.begun:,} the loss is far too high, up to {self.highest:.4g}: {known}"
        return f"{self.text}: {self.advice}"
