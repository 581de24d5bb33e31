"""Where the heartbeat of a real rank says that the step is, and what torch's flight recorder has of it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests import parity, world
from titanmoe.observe import Observer, listening
from titanmoe.watch.flight_recorder import Collective, FlightRecord, first_difference, read_recorder
from titanmoe.watch.heartbeat import PREVIOUS_BEGUN, STEP_BEGUN, Position
from titanmoe.watch.process_groups import name_groups, own_groups
from titanmoe.watch.run_watch import HeartbeatListener, Watch

CHANGES = {"data.source": "synthetic", "training.global_batch_size": 4}


class Places(Observer):
    """Notes where the heartbeat is at every announcement of a layer, after the heartbeat's own listener."""

    def __init__(self, listener: HeartbeatListener):
        self.listener, self.seen = listener, list[Position]()

    def layer(self, number: int) -> None:
        assert self.listener.heart.position == self.listener.position
        self.seen.append(self.listener.position)


def watched_trainer(changes: dict[str, Any]) -> tuple[Any, Watch]:
    runtime = parity.runtime_here()
    config = parity.read(parity.TINY | CHANGES | changes, runtime.world)
    trainer = parity.build_trainer(config, runtime, garbage=parity.no_collection)
    return trainer, Watch(config.training, config.checkpoint, trainer.training)


def step(changes: dict[str, Any]) -> tuple[list[Position], int]:
    trainer, watch = watched_trainer(changes)
    listener = next(one for one in watch.observers if isinstance(one, HeartbeatListener))
    with listening(listener), listening(places := Places(listener)):
        trainer.train_step()
    return places.seen, trainer.training.loader.microbatches


def test_the_heartbeat_follows_microbatch_layer_and_direction() -> None:
    for mode in ("none", "full"):
        results = world.run(4, step, {"parallelism.tp": 2, "activation_checkpoint.mode": mode})
        seen, microbatches = results[0]
        assert all(places == seen for places, _ in results)
        layers = sorted({place.layer for place in seen})
        assert layers == list(range(len(layers))) and len(layers) > 1 and microbatches > 1
        assert seen == [
            Position(0, m, layer, backward)
            for m in range(microbatches)
            for backward in (False, True)
            for layer in (layers[::-1] if backward else layers)
        ]


def test_a_rank_of_a_pipeline_says_its_stage() -> None:
    pipeline = {"parallelism.pp": 2, "pipeline.schedule": "Interleaved1F1B", "model.num_layers": 4}
    for rank, (seen, _) in enumerate(world.run(2, step, pipeline)):
        assert {place.stage for place in seen} == {rank, 2 + rank}
        assert {place.layer for place in seen} == {rank, 2 + rank} and {place.backward for place in seen} == {
            False,
            True,
        }


def two_steps(skips: bool) -> tuple[FlightRecord, list[str]]:
    """What the flight recorder has after two steps of a rank, which skips a sum in the second, if it does."""
    from titanmoe.train import gradients as module

    trainer, watch = watched_trainer({"parallelism.experts.ep": 2})
    real = module.all_reduce
    numbers = watch.heart.numbers
    with listening(HeartbeatListener(watch.heart)):
        trainer.train_step()
        module.all_reduce = (lambda x, group: x) if skips else real
        try:
            trainer.train_step()
        finally:
            module.all_reduce = real
    axes = [group.axes for group in name_groups(trainer.training.meshes.communicators, trainer.training.fold)]
    return read_recorder(
        own_groups(trainer.training.meshes.communicators), numbers[STEP_BEGUN], numbers[PREVIOUS_BEGUN]
    ), axes


def test_what_the_flight_recorder_has_of_a_step() -> None:
    results = world.run(2, two_steps, False)
    for found, axes in results:
        assert found.issued == len(found.last) or found.issued > len(found.last) > 10
        assert [message.index for message in found.last] == list(range(found.issued))[-len(found.last) :]
        assert found.differs == -1 and found.unfinished == {}
        assert {message.op for message in found.last} >= {"all_reduce", "all_to_all"}
        assert any("world" in axes[message.group] for message in found.last)
        for group, number in found.numbers.items():
            assert number == max([m.number for m in found.last if m.group == int(group)] or [number])
    assert [m.kind for m in results[0][0].last] == [m.kind for m in results[1][0].last]
    assert FlightRecord.from_json(found._asdict()) == found


def waits_for_rank_1() -> dict[str, int]:
    groups, store = {dist.group.WORLD.group_name: 7}, dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["read"])
    work = dist.all_reduce(torch.ones(1), async_op=True)
    found = read_recorder(groups, 0, 0)
    store.set("read", "")
    work.wait()
    return {} if dist.get_rank() == 1 else {"7": found.numbers["7"] - found.unfinished["7"]}


def test_a_message_that_has_not_completed() -> None:
    assert world.run(2, waits_for_rank_1) == [{"7": 0}, {}]


def test_a_skipped_message_shows_as_a_difference_from_the_step_before() -> None:
    for found, _ in world.run(2, two_steps, True):
        assert found.differs >= 0


def test_the_first_difference() -> None:
    def messages(*ops: tuple[int, str, int]) -> list[Collective]:
        return [Collective(i, group, op, "Float", elements, i) for i, (group, op, elements) in enumerate(ops)]

    whole = [(0, "all_gather", 6), (1, "all_to_all", 3), (1, "all_to_all", 5), (0, "all_gather", 6)]
    before = messages(*whole)
    assert first_difference(messages(*whole[:2]), before) == -1
    assert first_difference(messages(whole[0], (1, "all_to_all", 2)), before) == -1, "the data decide its rows"
    assert first_difference(messages(*whole[:3], (0, "all_gather", 5)), before) == 3
    assert first_difference(messages(whole[0], *whole[2:]), before) == 2
    assert read_recorder({}, time.time_ns(), 1).differs == -1 and torch.__version__
