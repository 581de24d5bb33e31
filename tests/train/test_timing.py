"""Where a step's time goes: phases add up to the whole, and a GPU's are read once it has passed them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support.fake_gpu import GPU, FakeGPU
from titanmoe.comm import interleave
from titanmoe.comm.interleave import InterleavedPair
from titanmoe.observe import OTHERS_TURN, listening, named, region
from titanmoe.train import timing as clock_module
from titanmoe.train.timing import Clock


@pytest.fixture
def now(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])
    return now


def test_phases_add_up_and_parts_are_counted_apart(now):
    clock = Clock(torch.device("cpu"))
    for step, (data, forward) in enumerate(((1.0, 5.0), (3.0, 7.0))):
        clock.phase("data", step)
        now[0] += data
        clock.phase("forward_backward", step)
        with clock.measure("dispatch"):
            now[0] += 2.0
        now[0] += forward - 2.0
    clock.phase("other", 1)
    assert clock.take(2) == {"data": 2.0, "forward_backward": 6.0, "dispatch": 2.0}
    assert clock.take(1) == {}
    now[0] += 4.0
    clock.phase("data", 2)
    assert clock.take(1) == {"other": 4.0}


def test_a_part_leaves_out_what_another_did_meanwhile(now):
    clock = Clock(torch.device("cpu"))
    both = InterleavedPair(partial(region, OTHERS_TURN))

    def half(seconds: float) -> None:
        with region("dispatch"):
            now[0] += seconds
            interleave.mark_sent()
            interleave.yield_if_sent()
            now[0] += seconds
        now[0] += 100.0  # not in any part,
        interleave.mark_sent()
        interleave.yield_if_sent()  # nor is the other side's time, while this side is in none

    clock.phase("forward_backward", 1)
    with listening(clock):
        both.run(lambda: half(1.0), lambda: half(10.0))
    clock.phase("optimizer", 1)
    assert clock.take(1) == {"forward_backward": 222.0, "dispatch": 22.0}


def test_regions_outside_of_forward_and_backward_do_not_count(now):
    clock = Clock(torch.device("cpu"))
    for name in ("data", "validation", "other"):
        clock.phase(name, 1)
        with listening(clock), region("dispatch"):
            now[0] += 1.0
    assert "dispatch" not in clock.take(1)


def test_a_part_within_a_part_is_counted_once(now):
    """A hierarchical dispatcher contains another. The way back counts as dispatch; other regions do not count."""
    clock = Clock(torch.device("cpu"))

    @named("dispatch")
    def sends(depth: int) -> None:
        now[0] += 1.0
        if depth:
            sends(depth - 1)

    clock.phase("forward_backward", 1)
    with listening(clock):
        sends(2)
        with region("experts"):
            now[0] += 10.0
        with pytest.raises(ZeroDivisionError), region("combine"):
            now[0] += 1.0
            _ = 1 / 0
        sends(0)
    sends(0)  # nobody listens
    assert clock.take(1) == {"dispatch": 5.0}


def test_on_a_gpu_only_marks_that_it_has_passed_are_read() -> None:
    with FakeGPU() as gpu:
        clock, gpu.passed = Clock(GPU), 0.0
        for name, seconds in (("data", 1.0), ("forward_backward", 4.0)):
            clock.phase(name, 1)
            gpu.now += seconds
        clock.phase("optimizer", 1)
        assert clock.take(1) == {}
        gpu.passed = 2.0
        assert clock.take(1) == {"data": 1.0}
        gpu.passed = 9.0
        assert clock.take(1) == {"forward_backward": 4.0}
        assert gpu.host_waits == 0


def test_marks_do_not_pile_up_between_reports() -> None:
    with FakeGPU() as gpu:
        clock = Clock(GPU)
        for _ in range(100):
            with clock.measure("dispatch"):
                clock.phase("data", 1)
                gpu.now += 2e-3
        assert len(clock._open) <= 2
        assert clock.take(100)["dispatch"] == pytest.approx(2e-3)
