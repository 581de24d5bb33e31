"""Learning rate as a function of the step, and warnings about rates that are too high or that change on resuming.

Called by titanmoe.train.build and titanmoe.train.header. A linear warmup to the peak, then decay to min_ratio of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from titanmoe.config.schema import LRSchedule
from titanmoe.config.schema import Optimizer as Options

HIGH_LR = {"AdamW": 2e-2, "Muon's matrices": 2e-1}
"""Peak rates above which the header warns, by kind of optimizer."""
USUAL_LR = {
    "AdamW": "1e-4 to 1e-3 is usual for a model from scratch and for LoRA, 1e-6 to 1e-5 for all weights of a model "
    "that has learnt already",
    "Muon's matrices": '3e-4 is usual with adjust_lr = "match_rms", 2e-2 with "original"',
}
"""Usual peak rates in words, for the warning."""


def lr_factor(step: int, steps: int, options: LRSchedule) -> float:
    """Return the learning rate of a step, from 1 to the run's number of `steps`, as a fraction of the peak rate.

    It is 1 at the end of the warmup and min_ratio at the last step; with decay = "none" it stays 1, and "wsd" decays
    only in the last decay_fraction of all steps.
    """
    if step <= options.warmup_steps:
        return step / options.warmup_steps
    floor = options.min_ratio
    progress = (step - options.warmup_steps) / max(1, steps - options.warmup_steps)
    if options.decay == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if options.decay == "linear":
        return 1 - (1 - floor) * progress
    if options.decay == "wsd":
        length = options.decay_fraction * steps
        return 1 - (1 - floor) * max(0.0, step - (steps - length)) / length if length else 1.0
    return 1.0


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """The learning rate's schedule: called with the number of a step, from 1, it returns the rate."""

    peak: float
    steps: int
    """Number of steps of the run."""
    options: LRSchedule

    def __call__(self, step: int) -> float:
        return self.peak * lr_factor(step, self.steps, self.options)


def warn_of_high_rate(options: Options) -> str:
    """Return a warning, for the header, about peak learning rates that are too high for most models; "" if none is.

    Rates of [[optimizer.groups]] count too: with Muon all groups by the limit of its matrices, 0.2, else by AdamW's,
    0.02. Other optimizers are never warned of.
    """
    of_adamw = {"optimizer.lr": options.lr}
    of_matrices: dict[str, float] = {}
    if options.name == "muon":
        of_matrices = {"optimizer.lr": options.lr}
        of_adamw = {"optimizer.adamw_lr": options.adamw_lr} if options.adamw_lr > 0 else of_adamw
    elif options.name != "adamw":
        return ""
    groups = {
        f"optimizer.groups, group {n}, lr": table["lr"] for n, table in enumerate(options.groups, 1) if "lr" in table
    }
    # A group may hold matrices, for which higher rates are usual: with Muon all groups are judged by their limit.
    (of_matrices if of_matrices else of_adamw).update(groups)
    lines = []
    for kind, rates in (("AdamW", of_adamw), ("Muon's matrices", of_matrices)):
        high = ", ".join(f"{name} = {rate:g}" for name, rate in rates.items() if rate > HIGH_LR[kind])
        lines += [f"{high}: above {HIGH_LR[kind]:g}, which is high for {kind}; {USUAL_LR[kind]}"] * bool(high)
    return "\n".join(lines)


def describe_rate_change(step: int, before: Mapping[str, Any], rate: LearningRate) -> list[str]:
    """Return a note if the learning rate changes by more than 1 % when a run resumes from a checkpoint; else [].

    Compared are the checkpoint's and the present schedule at `step`. Also [] at step 0, and if `before` lacks a field.

    Args:
        step: the step that the run resumes from.
        before: fields of the config that the checkpoint was saved with, by path, such as "optimizer.lr".
    """
    try:
        names = [field.name for field in dataclasses.fields(LRSchedule)]
        options = LRSchedule(**{name: before[f"lr_schedule.{name}"] for name in names})
        was = LearningRate(before["optimizer.lr"], before["training.steps"], options)(step)
        now = rate(step)
    except (LookupError, TypeError, ArithmeticError):  # saved by a version without one of these fields
        return []
    if not step or abs(now - was) <= 0.01 * was:
        return []
    now = rate(min(step + 1, rate.steps))  # the log's next line shows the rate of the next step
    if now < was:
        return [f"note: the learning rate falls from {was:.3g} to {now:.3g} here"]
    advice = f'; to keep it, set optimizer.lr = {was:.3g} and lr_schedule.decay = "none"' if was else ""
    return [
        f"note: the learning rate, which had come to {was:.3g}, rises to {now:.3g} here, and the loss may rise with "
        f"it{advice}"
    ]
