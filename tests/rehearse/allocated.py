"""What torch's CPU allocator hands out in real steps, from torch's profiler: independent of rehearsals."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests import parity
from tests.rehearse.small import config_of
from titanmoe.rehearse.rehearsal import FakeLoader
from titanmoe.train.trainer import Trainer

STEPS = 2


def peak(changes: dict[str, Any], world: int) -> int:
    """On the last rank of a real world: how many bytes the allocator's total rises above that at the start of a step.

    The lowest of several steps, because gloo's threads may hold what they have sent until after the next layer.
    """
    trainer = parity.build_trainer(
        config_of(changes, world, "cpu"), parity.runtime_here(), loader=FakeLoader, garbage=parity.no_collection
    )
    trainer.train_step()
    if dist.get_rank() == world - 1:
        return min(_peak(trainer) for _ in range(STEPS))
    for _ in range(STEPS):
        trainer.train_step()
    return -1


def _peak(trainer: Trainer) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiled:
        trainer.train_step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
