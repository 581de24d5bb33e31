"""A pipeline whose kernels are loaded before its first message: nothing of it is left, and no message is sent."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from tests import parity, world
from titanmoe import observe
from titanmoe.parallel import pipeline
from titanmoe.parallel.warm_up import warm_up
from titanmoe.rehearse.message_recorder import Recorder

EVERYTHING = {
    "parallelism.pp": 2,
    "parallelism.experts.ep": 2,
    "model.num_layers": 4,
    "model.tie_embeddings": True,
    "model.mtp_depth": 1,
    "moe.bias_update_rate": 0.01,
    "moe.aux_loss": 0.01,
    "moe.aux_loss_global": 0.01,
    "moe.aux_loss_sequence": 0.01,
    "moe.z_loss": 0.001,
    "moe.jitter": 0.1,
    "activation_checkpoint.mode": "full",
}
STEPS = 2


class Everything(observe.Observer):
    """What is announced, but for the seconds."""

    def __init__(self) -> None:
        self.heard: Counter[tuple[Any, ...]] = Counter()

    def phase(self, name: str, step: int) -> None:
        self.heard["phase", name, step] += 1

    def microbatch(self, stage: int, number: int, backward: bool) -> None:
        self.heard["microbatch", stage, number, backward] += 1

    def layer(self, number: int) -> None:
        self.heard["layer", number] += 1

    def region(self, name: str) -> None:
        self.heard["region", name] += 1

    def waits(self, group: str) -> None:
        self.heard["waits"] += 1


def clones(named: Any) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in named}


def steps(changes: dict[str, Any], cold: bool) -> dict[str, Any]:
    """What a rank has before its first message and after its steps, and what was announced."""
    trainer = parity.make_trainer(changes, loader=parity.samples())
    parts = trainer.training
    engine = parts.gradients.engine
    engine.cold = cold
    copies = {computed for stage in engine.stages for computed in stage.unsharded_experts.by_computed}
    passes: Counter[int] = Counter()
    for i, stage in enumerate(parts.stages):
        stage.register_forward_pre_hook(lambda *_, i=i: passes.update([i]))
    before, real, generator = {}, engine.schedule._step_microbatches, torch.get_rng_state()
    recorder = Recorder({}, False)
    buffers = [(f"{i}.{name}", x) for i, stage in enumerate(parts.stages) for name, x in stage.named_buffers()]

    def first(*args: Any) -> None:
        if not before:
            assert all(p.grad is None for p in (*parts.parameters.values(), *copies)), "a gradient is left"
            assert torch.equal(torch.get_rng_state(), generator), "torch's own generator was used"
            for stage in parts.stages:
                named = [(name, p) for name, p in stage.named_parameters() if p not in copies]
                assert all(p is parts.parameters[name] for name, p in named), "weights are gathered"
            before.update(clones(buffers), passes=Counter(passes))
        real(*args)

    def recorded(model: Any, *args: Any) -> None:
        handle = model.register_forward_hook(overflow)
        with recorder.recording():
            warm_up(model, *args)
        handle.remove()

    heard = Everything()
    with (
        observe.listening(heard),
        mock.patch.object(engine.schedule, "_step_microbatches", first),
        mock.patch.object(pipeline, "warm_up", recorded),
    ):
        reports = [trainer.train_step() for _ in range(STEPS)]
    sent = [message.group for message in recorder.log.messages]
    assert bool(sent) == cold and parts.meshes.pp.name not in sent
    assert not engine.cold
    return {
        "before": before,
        "reports": reports,
        "passes": passes,
        "heard": heard.heard,
        "weights": clones((name, getattr(p, "_local_tensor", p)) for name, p in parts.parameters.items()),
        "buffers": clones(buffers),
    }


def overflow(model: Any, *_: Any) -> None:
    """As if more rows had arrived than symmetric memory has room for."""
    for moe in model.moe_layers().values():
        if moe.dispatcher.memory is not None:
            moe.dispatcher.memory.needs_repeat.fill_(True)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and not isinstance(a, Counter):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


def both(changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return steps(changes, True), steps(changes, False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline.schedule": "ZBVZeroBubble", "moe.capacity_factor": 1.0, "activation_checkpoint.mode": "moe"},
        {"pipeline.schedule": "DualPipeV", "moe.overlap": "pairs", "activation_checkpoint.mode": "none"}
        | {"training.global_batch_size": 8},
        {"parallelism.reshard_after_forward": "always", "moe.dispatcher": "symm_mem"},
    ],
    ids=["1F1B", "ZBVZeroBubble", "pairs", "freed, symmetric memory"],
)
def test_steps_are_equal_to_the_last_bit(changes: dict[str, Any]) -> None:
    for warm, usual in world.run(4, both, EVERYTHING | changes):
        stages = warm["passes"].keys()
        assert warm["before"].pop("passes") == dict.fromkeys(stages, 1) and not usual["before"].pop("passes")
        assert {stage: count - 1 for stage, count in warm.pop("passes").items()} == usual.pop("passes")
        different = [name for name in usual if not equal(warm[name], usual[name])]
        assert not different, different


def validate_first(changes: dict[str, Any]) -> tuple[float, bool]:
    """The loss of a forward alone, for which kernels are loaded, and whether the engine is still cold."""
    parts = parity.make_trainer(changes, loader=parity.samples()).training
    slicer = dataclasses.replace(parts.slicer, with_mtp=False)
    engine, batches = parts.gradients.engine, parts.loader.peek()
    engine.cold = True
    parts.gradients.begin_step(slicer.count(batches))
    loss = engine.run(slicer.slices(batches), parts.gradients.objective, backward=False)
    return loss.item(), engine.cold


def test_kernels_of_multi_token_prediction_are_loaded_before_a_validation() -> None:
    losses = []
    for vocab in ("tensor", "pipeline"):
        changes = {"parallelism.pp": 2, "parallelism.vocab": vocab, "model.mtp_depth": 1}
        (_, first), (loss, last) = world.run(2, validate_first, changes)
        assert not first and not last
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def slices_of_losses(changes: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Which slices of a step losses are called with as kernels are loaded and the step runs, and all of the step."""
    parts = parity.make_trainer(changes, loader=parity.samples()).training
    engine, batches, seen = parts.gradients.engine, parts.loader.peek(), []
    slices, engine.cold = parts.slicer.slices(batches), True

    def loss(output_NBS: torch.Tensor, batch_slice: Any) -> torch.Tensor:
        seen.append(id(batch_slice))
        return parts.gradients.objective(output_NBS, batch_slice)

    parts.gradients.begin_step(parts.slicer.count(batches))
    engine.run(slices, loss)
    return seen, [id(one) for one in slices]


@pytest.mark.parametrize("vocab", ["tensor", "pipeline"])
def test_losses_see_the_slices_of_the_step_alone(vocab: str) -> None:
    """They record by a slice's identity: DPO's metrics, log-probabilities, a teacher's distributions."""
    changes = {"parallelism.pp": 2, "parallelism.vocab": vocab, "training.global_batch_size": 2}
    for seen, all_slices in world.run(2, slices_of_losses, changes):
        if seen:
            assert seen == [all_slices[0], *all_slices]


def test_only_gpus_load_their_kernels() -> None:
    assert not any(world.run(2, is_cold, {"parallelism.pp": 2}))


def is_cold(changes: dict[str, Any]) -> bool:
    return parity.make_trainer(changes, loader=parity.samples()).training.gradients.engine.cold
