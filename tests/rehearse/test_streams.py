"""FSDP's streams: which messages the computation waits for on a GPU, and when."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest

from tests.rehearse.small import config_of
from titanmoe.rehearse.record import Log
from titanmoe.rehearse.world import Rehearsal, rehearse

SMALL = {"training.global_batch_size": 4, "model.num_layers": 2}


@functools.cache
def of(**changes: object) -> Rehearsal:
    given = {f"parallelism.{name}": value for name, value in changes.items()}
    return rehearse(config_of(SMALL | given, 4, "h100"), 4, 0, "h100")


def waits(log: Log, number: int) -> int:
    return log.events.index(("wait", number))


@pytest.mark.parametrize("changes", [{}, {"dp_replicate": 2}], ids=["FSDP", "HSDP"])
def test_every_message_is_waited_for(changes: dict[str, int]) -> None:
    log = of(**changes).log
    assert {m.waited for m in log.messages} <= {"at once", "later"}


def test_a_reduction_waits_for_the_one_before_it() -> None:
    """FSDP keeps one buffer: the computation waits for a reduce-scatter before it fills the next one."""
    log = of().log
    numbers = [i for i, m in enumerate(log.messages) if m.op == "reduce-scatter"]
    assert len(numbers) > 2 and all(log.messages[i].waited == "later" for i in numbers)
    for this, following in pairwise(numbers):
        assert log.events.index(("issue", this)) < waits(log, this) < log.events.index(("issue", following))
    gathers = [i for i, m in enumerate(log.messages) if m.op == "all-gather"]
    assert any(waits(log, i) > log.events.index(("issue", i + 1)) for i in gathers)  # prefetched


def test_replicas_are_summed_on_a_stream_of_their_own() -> None:
    """The computation waits for them when backward ends."""
    found = of(dp_replicate=2)
    lanes = [found.groups[m.group].lane for m in found.log.messages]
    numbers = [i for i, lane in enumerate(lanes) if lane == "replicas"]
    last = max(i for i, m in enumerate(found.log.messages) if m.op == "reduce-scatter")
    assert numbers and waits(found.log, numbers[0]) > found.log.events.index(("issue", last))
