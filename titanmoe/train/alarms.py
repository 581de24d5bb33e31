"""What a run reports as events of its losses and loads: spikes, experts that die, a loss that flies away.

Each rule is reported once, when it has lasted, and only rank 0 asks.

A loss that diverges, or stays above that of a guess, is reported again when it is over. A healthy loss falls, wobbles
from batch to batch, and has spikes of a few steps. It is too high if, HIGH_STEPS in a row, it is over the lower of two
limits:

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
import statistics
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from titanmoe.config.blocks import moe_blocks
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.balance_losses.balance_rules import switched_on

WINDOW = 64
ENOUGH = 16
"""Number of steps needed to know what is usual."""
TIMES = 6.0
"""A spike is this many robust standard deviations (1.4826 * median absolute deviation) above the median."""
LEAST = 0.02
"""The deviation is at least this fraction of the median: that of a loss that hardly moves is almost zero."""


class Spikes:
    """Loss spikes, found by a rule that is robust to outliers: far above the median of the steps before."""

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=WINDOW)
        self.high = False

    def check(self, loss: float) -> str:
        """Return the text of the event, "" for none: a spike is reported once, at its first step."""
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


LASTS = 50
"""How many steps in a row it takes: one bad batch does not count."""
AT_ONCE = 10
"""How many in a row if the imbalance is the greatest possible, to within 1 %."""
DYING = 0.01
"""An expert is dying below this fraction of the mean load."""
HELP = "moe.bias_update_rate = 0.001 or moe.aux_loss = 0.01 balances them, moe.z_loss keeps router logits small"


def unbalanced(model: Model, moe: MoE) -> str:
    """The header's line for a run that nothing keeps in balance."""
    balanced = moe.bias_update_rate or any(term.rules.evens_loads for term in switched_on(moe))
    a_choice = moe_blocks(model) and model.num_experts > model.top_k
    if not a_choice or moe.force_balance or balanced:
        return ""
    return "none: nothing keeps the experts evenly busy, and some may die; " + HELP.partition(",")[0]


class Collapse:
    """Experts that die, and routing that collapses onto a few: reported once, when it has lasted."""

    def __init__(self, num_experts: int, top_k: int):
        self.greatest = num_experts / top_k
        """The greatest imbalance possible, when all tokens choose the same experts."""
        self.limit = max(2.0, self.greatest / 2)
        self._dying: dict[int, Counter[int]] = {}
        self._uneven: Counter[int] = Counter()
        self._collapsed: Counter[int] = Counter()

    def check(self, loads: dict[int, list[float]]) -> Iterator[str]:
        """Texts of events. loads: tokens of every expert in this step, by layer."""
        for layer, load in loads.items():
            mean = sum(load) / len(load)
            before, now = self._dying.get(layer, Counter()), Counter()
            for expert, tokens in enumerate(load):
                if tokens < DYING * mean:
                    now[expert] = before[expert] + 1
            self._dying[layer] = now
            if dead := [expert for expert, steps in now.items() if steps == LASTS]:
                many = "experts" if len(dead) > 1 else "expert"
                names = ", ".join(map(str, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
                yield f"layer {layer}: {many} {names} got under {DYING:.0%} of the mean load for {LASTS} steps; {HELP}"
            collapsed = 0 < 0.99 * self.greatest * mean <= max(load) and self.greatest > 1
            self._collapsed[layer] = self._collapsed[layer] + 1 if collapsed else 0
            if self._collapsed[layer] == AT_ONCE:
                yield (
                    f"layer {layer}: all tokens have chosen the same expert for {AT_ONCE} steps, {self.greatest:.1f} "
                    "times the mean load, which is the greatest possible: the routing has collapsed. Lower "
                    f"optimizer.lr and begin again, or from a checkpoint of before; {HELP}"
                )
            uneven = mean > 0 and max(load) > self.limit * mean
            self._uneven[layer] = self._uneven[layer] + 1 if uneven else 0
            if self._uneven[layer] == LASTS and not collapsed:
                ratio = max(load) / mean
                yield (
                    f"layer {layer}: the busiest expert had over {self.limit:g} times the mean load for {LASTS} "
                    f"steps, now {ratio:.1f} times; {HELP}"
                )


FIRST, LOWEST, FAR = 1.0, 2.0, 10.0
HIGH_STEPS, GUESSED, TWICE = 16, 50, 2


class Expected(NamedTuple):
    """What is known of a run's loss before it begins."""

    warmup: int
    """lr_schedule.warmup_steps"""
    lr: float
    """optimizer.lr"""
    guess: float
    """The loss of a uniform guess; infinite if there is nothing to learn."""


class Divergence:
    """A loss that flies away, or stays above that of a guess."""

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
            if self.calm < HIGH_STEPS:
                return ""
            self.text = ""
            return f"the loss has come back to {loss:.4g}"
        if self.over >= HIGH_STEPS or self.far >= TWICE:
            known = f"it was {self.first:.4g} at the first step"
            if self.lowest < 0.99 * self.first:
                known += f", and {self.lowest:.4g} on average at its lowest"
        elif self.guessing >= GUESSED:
            known = f"a uniform guess has {self.guess:.4g}"
        else:
            return ""
        self.text = f"since step {self.begun:,} the loss is far too high, up to {self.highest:.4g}: {known}"
        return f"{self.text}: {self.advice}"
