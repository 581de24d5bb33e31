"""FSDP's streams: which messages the computation waits for on a GPU, and when."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import pairwise

import pytest

from tests.rehearse.small import config_of
from titanmoe.rehearse.message_recorder import Log
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse

SMALL = {"training.global_batch_size": 4, "model.num_layers": 2}


@functools.cache
def of(**changes: object) -> Rehearsal:
    options = {f"parallelism.{name}": value for name, value in changes.items()}
    return rehearse(config_of(SMALL | options, 4, "h100"), 4, 0, "h100")


def waits(log: Log, number: int) -> int:
    return log.events.index(("wait", number))


@pytest.mark.parametrize("changes", [{}, {"dp_replicate": 2}], ids=["FSDP", "HSDP"])
def test_every_message_is_waited_for(changes: dict[str, int]) -> None:
    log = of(**changes).log
    assert {m.wait_timing for m in log.messages} <= {"at once", "later"}


def test_a_reduction_waits_for_the_one_before_it() -> None:
    """FSDP keeps one buffer: the computation waits for a reduce-scatter before it fills the next one."""
    log = of().log
    numbers = [i for i, m in enumerate(log.messages) if m.op == "reduce-scatter"]
    assert len(numbers) > 2 and all(log.messages[i].wait_timing == "later" for i in numbers)
    for this, following in pairwise(numbers):
        assert log.events.index(("issue", this)) < waits(log, this) < log.events.index(("issue", following))
    gathers = [i for i, m in enumerate(log.messages) if m.op == "all-gather"]
    assert any(waits(log, i) > log.events.index(("issue", i + 1)) for i in gathers)  # prefetched


def test_replicas_are_summed_on_a_stream_of_their_own() -> None:
    """The computation waits for them when backward ends."""
    rehearsal = of(dp_replicate=2)
    communicators = [rehearsal.groups[m.group].kind for m in rehearsal.log.messages]
    numbers = [i for i, kind in enumerate(communicators) if kind == "replicas"]
    last = max(i for i, m in enumerate(rehearsal.log.messages) if m.op == "reduce-scatter")
    assert numbers and waits(rehearsal.log, numbers[0]) > rehearsal.log.events.index(("issue", last))


def test_routers_are_gathered_and_reduced_by_nobody() -> None:
    """They compute wider than the rest, so FSDP would send each in messages of its own: two all-gathers and a
    reduce-scatter more per layer and microbatch. Their gradients are summed once, after the step's last backward."""

    def message_counts(layers: int, microbatches: int) -> Counter[str]:
        changes = {"model.num_layers": layers, "training.global_batch_size": 4 * microbatches}
        rehearsal = rehearse(
            config_of({"training.mixed_precision_param": "bfloat16"} | changes, 4, "h100"), 4, 0, "h100"
        )
        log = rehearsal.log
        last = max(i for i, m in enumerate(log.messages) if rehearsal.groups[m.group].kind == "shards")
        sums = [i for i, m in enumerate(log.messages) if m.site.file == "parallel/parallel_plan.py"]
        assert sums and all(i > last for i in sums)
        assert sum(log.messages[i].sent_bytes for i in sums) == layers * 8 * 16 * 4  # experts x width, float32
        of_layers = [m for m in log.messages if m.site.layer.startswith("layers.")]
        return Counter(f"{rehearsal.groups[m.group].kind} {m.op}" for m in of_layers) + Counter(router=len(sums))

    one_layer, two_layers, more_microbatches = message_counts(1, 1), message_counts(2, 1), message_counts(1, 2)
    for more in two_layers - one_layer, more_microbatches - one_layer:
        # The block and its experts, gathered in forward and in backward.
        assert (more["shards all-gather"], more["shards reduce-scatter"], more["router"]) == (4, 2, 0)
