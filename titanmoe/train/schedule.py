"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from titanmoe.config.schema import LRSchedule


def lr_factor(step: int, steps: int, options: LRSchedule) -> float:
    """Fraction of the peak rate for step 1, 2, ..., steps."""
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
