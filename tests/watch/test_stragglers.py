"""Who is named as slow, and for what: from simulated arrivals, from a fake clock, and in a run of real ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests import parity, world
from tests.support.fake_gpu import FakeGPU
from tests.watch import simulated
from tests.watch.simulated import Cluster, Fault, Told
from titanmoe.observe import listening
from titanmoe.watch import slow_links, stragglers
from titanmoe.watch.process_groups import AxisGroups, name_groups, own_groups
from titanmoe.watch.slow_links import Link, distances, find_slow_link, groups_to_probe
from titanmoe.watch.step_times import CudaEventTimer, HostTimer, StepTimes
from titanmoe.watch.stragglers import ON_ONE_HOST, peer_times

SHAPES = {"a stage": (1, 8, 4), "stages": (2, 4, 4), "two ranks": (1, 2, 2), "stages of two": (4, 2, 2)}
"""pp, dp_shard, ep."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("kind", ["compute", "data", "link"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_slow_rank_or_link_is_named_until_it_is_fast_again(shape: str, kind: str, seed: int) -> None:
    """Clocks are off by minutes, ranks compute unevenly, and the last stage always takes longer."""
    cluster = Cluster(*SHAPES[shape], seed)
    told, fault = Told(cluster), simulated.faults(np.random.default_rng(seed), cluster)[kind]
    ranks = [fault.rank, fault.other] if kind == "link" else [fault.rank]
    assert told.go(5, Fault(), 4) == []
    if (shape, kind) == ("two ranks", "link"):  # there is no other link to compare it with
        assert told.go(3, fault, 4) == []
        return
    for _ in range(2):
        (event,) = told.go(3, fault, 4)
        assert (event["ranks"], event["cause"]) == (ranks, kind), event
        assert told.report()["straggler.cause"] == 1 + ("compute", "data", "link").index(kind)
        assert told.go(8, Fault(), 4) == [] and told.straggler is None
    assert told.report()["straggler.cause"] == 0


def test_what_is_said() -> None:
    cluster = Cluster(2, 16, 16, 0)
    told = Told(cluster)
    (event,) = told.go(2, Fault(compute=2.0, rank=21), 8)
    assert event["text"].startswith("rank 21 on node2 takes 0.06") and "computing: look at its host" in event["text"]
    told = Told(cluster)
    assert told.go(2, Fault(), 8) == []
    (event,) = told.go(2, Fault(link_s=0.01, rank=17, other=25), 8)
    assert event["text"].startswith(
        "the link between rank 17 on node2 and rank 25 on node3: 20.2 ms for a round trip, "
    )
    assert told.report()["straggler.other_rank"] == 25 and event["excess_s"] > 0.1
    assert [link[:2] for link in event["links_ms"]] == [[17, 25]]
    assert event["text"].endswith("of a step: look at cables, ports and drivers")


def test_on_one_host_nobody_is_sent_to_look_at_cables() -> None:
    (event,) = Told(Cluster(1, 8, 8, 0)).go(2, Fault(compute=2.0, rank=3), 8)
    assert event["text"].endswith("computing: " + ON_ONE_HOST["compute"]) and "do without" not in event["text"]
    told = Told(Cluster(2, 16, 16, 0))
    assert told.go(2, Fault(), 8) == []
    (event,) = told.go(2, Fault(link_s=0.01, rank=17, other=18), 8)
    assert event["text"].startswith("the link between rank 17 on node2 and rank 18 on node2: 20 ms for a")
    assert event["text"].endswith("of a step: " + ON_ONE_HOST["link"])


def test_a_rank_that_is_a_stage_alone_is_compared_with_its_past() -> None:
    told = Told(Cluster(4, 1, 1, 0, longer=3))
    assert told.go(5, Fault(), 8) == []
    assert told.report()["straggler.stage"] == 3 and told.report()["straggler.stage_excess_s"] > 0.03
    (event,) = told.go(3, Fault(compute=2.0, rank=1), 8)
    assert (event["ranks"], event["cause"]) == ([1], "compute")
    x_NR = np.array([[4.0, 2.0, 2.0]])
    assert peer_times(x_NR, 1, np.array([2.0, 1.0, 1.0])).tolist() == [[4.0, 2.0, 2.0]], "all are as slow: nobody is"


def test_a_pause_is_no_straggler() -> None:
    """A few slow steps, or one bad window, name nobody."""
    told = Told(cluster := Cluster(1, 8, 8, 0))
    told.go(2, Fault(), 8)
    for factors in ([9.0] * 3 + [1.0] * 5, [1.0] * 8, [2.0] * 8, [1.0] * 8):
        told.evaluate_window(
            list(range(8)), np.stack([cluster.step(Fault(compute=factor, rank=5)) for factor in factors])
        )
    assert told.said == []


def test_links_are_probed_on_suspicion_only() -> None:
    probes = 0

    class Counted(Told):
        def _pair_times(self) -> slow_links.PairSeconds:
            nonlocal probes
            probes += 1
            return super()._pair_times()

    told = Counted(Cluster(1, 8, 8, 0))
    told.go(20, Fault(), 8)
    told.go(4, Fault(compute=2.0, rank=3), 8)
    assert probes == 0, "all is calm, then a rank is late"
    told.go(4, Fault(link_s=0.01, rank=1, other=2), 8)
    assert 0 < probes <= stragglers.IN_A_ROW, "once it has lasted for two windows, until the second probe agrees"


def test_which_link() -> None:
    host_of = {rank: f"node{rank // 4}" for rank in range(8)}
    pairs = {(a, b): 1.0 if a // 4 == b // 4 else 5.0 for a in range(8) for b in range(a + 1, 8)}
    assert find_slow_link(pairs, host_of, {}) is None, "between machines all take longer"
    assert find_slow_link(pairs | {(1, 3): 4.0}, host_of, {}) == Link(1, 3, 4.0, 1.0, {(1, 3): 4.0})
    assert find_slow_link(pairs | {(2, 5): 30.0}, host_of, {}) == Link(2, 5, 30.0, 5.0, {(2, 5): 30.0})
    shaky = {(2, 5): 30.0, (2, 3): 4.0, (0, 2): 4.0, (1, 2): 4.0, (2, 4): 16.0}
    assert find_slow_link(pairs | shaky, host_of, {})[:2] == (2, 5), "the other links of rank 2 are far from as slow"
    of_one = {pair: 20 * seconds for pair, seconds in pairs.items() if 6 in pair}
    assert find_slow_link(pairs | of_one, host_of, {})[:2] == (6, None)
    assert find_slow_link({(0, 1): 9.0}, host_of, {}) is None and find_slow_link({(0, 1): 9.0}, host_of, {(0, 1): 1.0})


def test_all_pairs_of_small_groups_and_of_those_with_rows_are_tried() -> None:
    for size in (2, 5, 16):
        met = {(i, i ^ d) for d in distances(size, "blocking") for i in range(size) if i < i ^ d < size}
        assert len(met) == size * (size - 1) / 2
    assert len(distances(64, "dispatch")) == 63 and distances(24, "shards") == [1, 2, 4, 8, 16]
    whole, halves = ((0, 1, 2, 3),), ((0, 1), (2, 3))
    groups = [
        AxisGroups("blocking", whole, "world"),
        AxisGroups("dispatch", halves, "ep"),
        AxisGroups("dispatch", whole, "ep = dp"),
    ]
    assert groups_to_probe(groups) == [1, 2]


# ---- a rank's own times


class Counter:
    """A timer that is told what time it is."""

    every, unreadable_steps, now = 1, 0, 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


OWN = {"of the world": 0, "of ep": 1}


def step(times: StepTimes, clock: Any, number: int, update: bool = True, generates: bool = False) -> None:
    """1 s between steps, then 2 s of data with 0.5 of waiting in it, 3 s of computing, 4 s of waiting in ep.

    With `generates` there are completions and rewards before computing.
    """

    def wait(group: str, seconds: float) -> None:
        times.waits(group)
        clock.now += seconds
        times.arrived()

    times.phase("checkpoint", number - 1)
    clock.now += 1
    wait("of ep", 7)
    times.phase("other", number - 1)
    times.phase("data", number)
    clock.now += 1.5
    wait("of the world", 0.5)
    for name in ("generate", "reward") if generates else ():
        times.phase(name, number)
        clock.now += 5
        wait("of ep", 2)
    times.phase("forward_backward", number)
    clock.now += 2
    wait("of ep", 1)
    wait("of ep", 3)
    times.phase("forward_backward", number)  # the pass is repeated
    clock.now += 1
    times.phase("optimizer", number)
    wait("of a saving thread", 0)
    if update:
        times.updated(number)


def test_what_is_between_steps_does_not_count() -> None:
    times = StepTimes(["world", "ep", "world"], OWN, clock := Counter())
    for number in (7, 8, 9, 10):
        step(times, clock, number, update=number != 9)
    assert times.axes == ["world", "ep"]
    steps, rows = times.take()
    assert steps == [8, 10], "not the first of the process, nor one without an update"
    assert rows == [[3.0, 1.5, 0.5, 4.0]] * 2 and times.messages == [1, 2]
    assert times.take() == ([], [])


def test_completions_and_rewards_do_not_count() -> None:
    times = StepTimes(["world", "ep", "world"], OWN, clock := Counter())
    for number in (1, 2, 3):
        step(times, clock, number, generates=number == 2)
    assert times.take() == ([2, 3], [[3.0, 0.0, 0.0, 4.0], [3.0, 1.5, 0.5, 4.0]])


def test_on_a_gpu_events_are_read_a_step_later() -> None:
    with FakeGPU() as gpu:
        gpu.passed = 0.0  # reading an event that the device has not reached fails
        times = StepTimes(["world", "ep"], OWN, CudaEventTimer())
        for number in range(1, 17):
            step(times, gpu, number)
        gpu.passed = gpu.now - 1e-3
        steps, rows = times.take()
        assert steps == [4, 8, 12], "every fourth; the device may not have finished the last one"
        assert rows == [pytest.approx([3.0, 1.5, 0.5, 4.0])] * 3
        assert gpu.host_waits == 0


# ---- real ranks

SLOW = 3


def train(changes: dict[str, Any]) -> list[int]:
    """Rank SLOW sleeps in its steps, rank 1 between them."""
    from titanmoe.rank import watch
    from titanmoe.watch.number_checks import checks

    rank = int(torch.distributed.get_rank())

    def pause(every: int) -> Any:
        return SimpleNamespace(collect=lambda step: time.sleep(0.3 * (rank == 1)))

    config, runtime = parity.read(changes, 4), parity.runtime_here()
    trainer = parity.build_trainer(config, runtime, checks=checks, garbage=pause)
    slices = trainer.training.slicer.slices

    def slowly(batches: list) -> list:
        time.sleep(0.3 * (rank == SLOW))
        return slices(batches)

    trainer.training.slicer.slices = slowly
    often = mock.patch.object(stragglers, "WINDOW", 4), mock.patch.object(HostTimer, "every", 1)
    with often[0], often[1], watch(config, trainer.training):
        trainer.train()
    return trainer.training.guard.checks.stragglers.times.messages


def test_a_slow_rank_of_a_real_run_is_named(tmp_path: Path) -> None:
    mapping = {"parallelism.pp": 2, "parallelism.experts.ep": 2, "training.steps": 13, "training.global_batch_size": 4}
    run = {"job.dump_folder": str(tmp_path), "job.name": "run", "data.source": "synthetic", "training.timeout_s": 60}
    results = world.run(4, train, parity.TINY | mapping | run)

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]

    (event,) = (line for line in lines("events.jsonl") if line["kind"] == "straggler")
    assert (event["ranks"], event["cause"]) == ([SLOW], "compute") and 0.25 < event["excess_s"] < 0.6
    last = lines("metrics.jsonl")[-1]
    assert last["straggler.rank"] == SLOW and last["straggler.cause"] == 1
    assert 0.25 < last["straggler.excess_s"] < 0.6 and last["straggler.stage"] == 1
    ranks = lines("ranks.jsonl")
    assert [line["step"] for line in ranks] == list(range(2, 13)), "each step but the first, by windows of 4"
    seconds = {name: np.mean([line["seconds"][name] for line in ranks], 0) for name in ranks[0]["seconds"]}
    assert seconds["compute"].argmax() == SLOW and seconds["pp"].min() > 0 and "ep" in " ".join(seconds)
    assert sum(x[SLOW] for x in seconds.values()) < sum(x[0] for x in seconds.values()) + 0.3
    # The first wait for another stage ends where the stage gathers its weights, the last where losses are summed.
    assert all(messages[list(seconds).index("pp") - 2] >= 3 for messages in results)


LATE_S = 0.3


def step_with_a_late_rank(changes: dict[str, Any]) -> dict[str, float]:
    """Rank SLOW is late in the only step; returns what this rank spent its time on."""
    trainer = parity.make_trainer(changes)
    parts, slices = trainer.training, trainer.training.slicer.slices
    groups, own = name_groups(parts.meshes.communicators, parts.fold), own_groups(parts.meshes.communicators)
    times = StepTimes([group.axes for group in groups], own, HostTimer())
    times.phase("data", 0)  # the first step of a process is not measured

    def slowly(batches: list) -> list:
        time.sleep(LATE_S * (torch.distributed.get_rank() == SLOW))
        return slices(batches)

    parts.slicer.slices = slowly
    with mock.patch.object(HostTimer, "every", 1), listening(times):
        trainer.train_step()
    (row,) = times.take()[1]
    return dict(zip(("compute", "data", *times.axes), row, strict=True))


@pytest.mark.parametrize("replicas, param", [(2, "bfloat16"), (2, "float32"), (4, "float32")])
def test_waiting_for_replicas_is_no_computing(replicas: int, param: str) -> None:
    """torch itself sums over them. Ranks 0 and 1 meet the late one nowhere before that."""
    mapping = {"parallelism.dp_replicate": replicas, "parallelism.experts.ep": 2}
    numbers = {"training.dtype": "float32", "training.mixed_precision_param": param}
    numbers |= {"training.mixed_precision_reduce": "float32", "data.source": "synthetic"}
    for times in world.run(4, step_with_a_late_rank, parity.TINY | mapping | numbers)[:2]:
        waited = sum(seconds for axes, seconds in times.items() if "replicate" in axes)
        assert waited > 0.8 * LATE_S, times


def test_on_a_gpu_the_result_has_arrived_when_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("send", "recv"):
        monkeypatch.setattr(torch.distributed, name, lambda x, name=name, **group: order.append(name))
    with FakeGPU() as gpu:
        x = torch.zeros(8, device="cuda")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
        assert slow_links._round_trip(x, None, 0, 1) > 0
        assert order == ["send", "recv", "wait"] * (slow_links.TRIES + 1)
        order.clear()
        assert slow_links._round_trip(x, None, 1, 0) == 0 and "wait" not in order
        assert gpu.host_waits == 0
