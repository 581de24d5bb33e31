"""What torch's CPU allocator hands out over real steps, as torch's profiler notes it: nothing of a rehearsal's."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests import parity
from tests.rehearse.small import config_of
from titanmoe.rehearse.samples import Samples
from titanmoe.train.trainer import Trainer

STEPS = 2


def peak(changes: dict[str, Any], world: int) -> int:
    """On a rank of a real world: bytes by which the allocator's sum rises over that at the start of a step.

    The least of several: gloo's threads hold what they send until they next look, which may be after the next layer.
    """
    trainer = Trainer(
        config_of(changes, world, "cpu"), parity.runtime_here(), loader=Samples, garbage=parity.no_collection
    )
    trainer.train_step()
    return min(_peak(trainer) for _ in range(STEPS))


def _peak(trainer: Trainer) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiled:
        trainer.train_step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
