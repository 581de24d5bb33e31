"""Experts that no other data rank shares (edp = 1): the numbers are those of FSDP, and nothing is copied twice."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests import parity, world
from tests.rehearse.small import config_of
from titanmoe.parallel import unsharded
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse

MIXED = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
MIXED |= {"training.mixed_precision_reduce": "float32"}
EP = "parallelism.experts.ep"
MAPPINGS: dict[str, dict[str, Any]] = {
    "tp2 ep4": {"parallelism.tp": 2, EP: 4},
    "ep2 etp2, biases": {EP: 2, "parallelism.experts.etp": 2, "model.expert_linear_bias": True},
    "sums in bfloat16": {EP: 4, "training.mixed_precision_reduce": "bfloat16"},
    "pipeline": {"parallelism.pp": 2, EP: 2},
    "pipeline, sums in bfloat16": {"parallelism.pp": 2, EP: 2, "training.mixed_precision_reduce": "bfloat16"},
    "summed once": {EP: 4, "parallelism.reduce_once": True, "activation_checkpoint.mode": "full"},
    "adapters": {EP: 2, "parallelism.experts.etp": 2, "lora.rank": 4},
}
REPLICAS = {"parallelism.dp_replicate": 2, EP: 2}


def measure(changes: dict[str, Any], together: bool) -> parity.Outcome | None:
    """together: gate and up in one product, if they can be."""
    real = unsharded.multiplied_together
    with mock.patch.object(unsharded, "multiplied_together", lambda *pair: together and real(*pair)):
        return parity.measure(changes)


def run(changes: dict[str, Any], choice: str, together: bool = True) -> parity.Outcome:
    return world.run(4, measure, MIXED | changes | {"parallelism.reshard_after_forward": choice}, together)[0]


@pytest.mark.parametrize("changes", MAPPINGS.values(), ids=MAPPINGS)
def test_every_bit_is_that_of_fsdp(changes: dict[str, Any]) -> None:
    """ "always" leaves these experts to FSDP, with two products for gate and up."""
    own, fsdp = (run(changes, choice, together=False) for choice in ("auto", "always"))
    assert (own.loss, own.norm) == (fsdp.loss, fsdp.norm)
    for mine, its in ((own.grads, fsdp.grads), (own.weights, fsdp.weights)):
        assert mine.keys() == its.keys()
        assert [name for name in mine if not torch.equal(mine[name], its[name])] == []


WIDE = {"training.dtype": "float64", "training.mixed_precision_param": "float32"}
WIDE |= {"training.mixed_precision_reduce": "float64"}
BIASES = {"model.expert_linear_bias": True, "model.expert_activation": "clamped_swiglu"}
ACCUMULATE = {"moe.accumulate_weight_gradients": True}
COPIED = {
    "tp2 ep4": {"parallelism.tp": 2, EP: 4},
    "biases, recomputed": {EP: 2, "parallelism.experts.etp": 2, "activation_checkpoint.mode": "full"} | BIASES,
    "accumulated": {EP: 4} | ACCUMULATE,
    "accumulated, replicas, pipeline": REPLICAS | {"parallelism.pp": 2, EP: 1} | ACCUMULATE,
}


@pytest.mark.parametrize("changes", COPIED.values(), ids=COPIED)
def test_one_product_for_gate_and_up(changes: dict[str, Any]) -> None:
    """Copies in float32 of weights in float64."""
    parity.check(4, WIDE | changes, freeze=True)


ACCUMULATED = {
    "reduced at the end": {"parallelism.tp": 2, EP: 4, "activation_checkpoint.mode": "full"} | BIASES,
    "replicas, halves": REPLICAS
    | {"moe.overlap": "halves", "training.local_batch_size": 2, "training.global_batch_size": 8},
    "backward in two parts": {
        "parallelism.pp": 2,
        EP: 2,
        "model.num_layers": 4,
        "pipeline.schedule": "InterleavedZeroBubble",
        "training.global_batch_size": 8,
    },
}


@pytest.mark.parametrize("changes", ACCUMULATED.values(), ids=ACCUMULATED)
def test_gradients_added_inside_their_products(changes: dict[str, Any]) -> None:
    parity.check(4, changes | ACCUMULATE)


@pytest.mark.parametrize("changes", [REPLICAS, REPLICAS | {"parallelism.pp": 2, EP: 1}], ids=["alone", "pipeline"])
def test_replicas_have_the_sum(changes: dict[str, Any]) -> None:
    parity.check(4, changes)
    own, fsdp = (run(changes, choice, together=False) for choice in ("auto", "always"))
    for name, grad in fsdp.grads.items():
        assert float((own.grads[name] - grad).abs().max()) <= 1e-5 * float(grad.abs().max()), name


def memory_of_copies(changes: dict[str, Any]) -> tuple[int, int]:
    """In bytes, between steps and in the middle of one."""
    trainer = parity.make_trainer(MIXED | changes, loader=parity.samples())
    (stage,) = trainer.training.stages
    copies = trainer.training.gradients.engine.unsharded_experts.by_computed
    in_step = []
    stage.layers["1"].register_forward_hook(
        lambda *_: in_step.append(sum(x.untyped_storage().nbytes() for x in copies))
    )
    trainer.train_step()
    experts = stage.layers["1"].moe.experts
    assert not isinstance(experts, FSDPModule)
    assert experts.w1 is trainer.training.parameters["layers.1.moe.experts.w1"]
    return sum(x.untyped_storage().nbytes() for x in copies), in_step[0]


def test_copies_have_memory_only_while_a_step_runs() -> None:
    elements = 3 * 16 * 16 * 8 // 4 * 2
    assert world.run(4, memory_of_copies, {EP: 4})[0] == (0, 2 * elements)
    same = dict.fromkeys(MIXED, "float32")  # no copy: the weights themselves
    assert world.run(4, memory_of_copies, {EP: 4} | same)[0] == (4 * elements, 4 * elements)


def rehearsed(**changes: Any) -> Rehearsal:
    base = MIXED | {"training.global_batch_size": 12, EP: 4}
    return rehearse(config_of(base | {k.replace("__", "."): v for k, v in changes.items()}, 4, "h100"), 4, 0, "h100")


def test_weights_are_copied_once_a_step_and_gradients_never() -> None:
    """Three microbatches, two layers."""
    found = Counter()
    for operation, n in rehearsed().operations.items():
        if operation.site.file == "parallel/unsharded.py":
            found[operation.name, operation.site.phase] += n
    weights, microbatches = 2 * 3, 3
    assert found == {
        ("_foreach_copy_", "forward"): 2,  # those side by side apart
        ("_to_copy", "backward"): weights,
        ("add_", "backward"): weights * (microbatches - 1),
    }


@pytest.mark.parametrize("pp", [1, 2])
def test_replicas_sum_once_a_step(pp: int) -> None:
    """After the last microbatch: without a pipeline during the rest of its backward."""
    changes = {"parallelism__experts__ep": 2 // pp, "parallelism__pp": pp, "parallelism__dp_replicate": 2}
    sums = [m for m in rehearsed(**changes).log.messages if m.site.file == "parallel/unsharded.py"]
    assert [m.op for m in sums] == ["all-reduce"] * 3 * (2 // pp)
    assert {m.wait_timing for m in sums} == {"later"}
    assert {m.site.phase for m in sums} == {"backward" if pp == 1 else "forward"}
