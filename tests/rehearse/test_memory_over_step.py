"""A rank's memory, compared with torch's allocator on real ranks, and by component."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import world
from tests.rehearse import allocated
from tests.rehearse.small import config_of
from tests.support.case_features import MODELS
from titanmoe.rehearse.fake_recorder import FakeRecorder
from titanmoe.rehearse.memory_over_step import SAVED_ACTIVATIONS, Memory
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse

MIDDLE: dict[str, Any] = {
    "model.dim": 128,
    "model.num_kv_heads": 4,
    "model.head_dim": 16,
    "model.expert_hidden": 128,
    "model.vocab_size": 1024,
    "training.seq_len": 128,
    "training.global_batch_size": 4,
}
EP4 = {"parallelism.experts.ep": 4}
PP = {"parallelism.pp": 2, "parallelism.experts.ep": 2, "pipeline.schedule": "1F1B"}
MAPPINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, MIDDLE | {"training.global_batch_size": 2, "training.local_batch_size": 2}),
    "tiny tp2 ep4": (4, {"parallelism.tp": 2, "training.global_batch_size": 4} | EP4),
    "tp2 ep4 full": (4, MIDDLE | {"parallelism.tp": 2, "activation_checkpoint.mode": "full"} | EP4),
    "cp2 ep2 etp2": (4, MIDDLE | {"parallelism.cp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2}),
    "pp2 ep2": (4, MIDDLE | PP),
    "dp4 edp4 selective": (4, MIDDLE | {"activation_checkpoint.mode": "selective"}),
}


def rehearsed(changes: dict[str, Any], ranks: int, rank: int, steps: int = 1) -> Rehearsal:
    return rehearse(config_of(changes, ranks, "cpu"), ranks, rank, "cpu", steps=steps)


def over(memory: Memory) -> int:
    return memory.peak - memory.at_start


LATENT = MODELS["deepseek_v3"] | {"model.num_dense_layers": 1, "model.num_kv_heads": 8, "parallelism.cp": 2}
INTERLEAVED = {"pipeline.schedule": "Interleaved1F1B", "pipeline.virtual_stages": 2, "model.num_layers": 4}
WIDER: dict[str, tuple[int, dict[str, Any]]] = {
    "latents cp2 ep4": (4, MIDDLE | LATENT | EP4),
    "pp2 ep2 interleaved": (4, MIDDLE | PP | INTERLEAVED),
}


@pytest.mark.parametrize("name", [*MAPPINGS, *(pytest.param(name, marks=pytest.mark.slow) for name in WIDER)])
def test_the_peak_is_that_of_real_ranks(name: str) -> None:
    ranks, changes = (MAPPINGS | WIDER)[name]
    real = world.run(ranks, allocated.peak, changes, ranks)
    steps = 2 if "parallelism.pp" in changes else 1  # the first step allocates the receive buffers
    last = ranks - 1
    assert over(rehearsed(changes, ranks, last, steps).memory) == pytest.approx(real[last], rel=0.05)


def test_a_storage_counts_from_the_operation_that_makes_it_until_nothing_refers_to_it() -> None:
    noted = FakeRecorder({}, 0, False, fake := FakeTensorMode(allow_non_fake_inputs=True))
    with fake, noted.recording():
        noted.begin_step()
        x = torch.zeros(100)
        y = x.view(10, 10)[2:] + 1
        del x
        assert noted.ledger.current == 80 * 4
        y.untyped_storage().resize_(0)  # as FSDP frees whole weights
        assert noted.ledger.current == 0
        y.untyped_storage().resize_(40 * 4)
        z = torch.zeros(30)
    memory = noted.ledger.memory()
    assert (noted.ledger.current, memory.peak) == (70 * 4, 180 * 4)
    assert [(storages.count, storages.size) for storages in memory.at_peak] == [(2, 720)] and len(z) == 30


def test_components() -> None:
    """Components add up to the peak, and weights and moments are exactly the bytes of their tensors."""
    deep = MIDDLE | {"model.num_layers": 4, "training.global_batch_size": 16, "training.local_batch_size": 16}

    def both(changes: dict[str, Any]) -> list[Rehearsal]:
        """Without recomputation, and with all of it."""
        modes = ("none", "full")
        return [rehearsed(deep | changes | {"activation_checkpoint.mode": mode}, 1, 0) for mode in modes]

    in_head, in_backward = both({}), both({"model.vocab_size": 64})
    in_update = rehearsed(deep | {"training.global_batch_size": 1, "training.local_batch_size": 1}, 1, 0)
    for rehearsal in *in_head, *in_backward, in_update:
        memory = rehearsal.memory
        assert sum(memory.components.values()) == memory.peak == sum(line.size for line in memory.at_peak)
        assert rehearsal.parameter_bytes <= memory.components["weights"] <= 1.001 * rehearsal.parameter_bytes
        assert memory.components["moments"] == rehearsal.optimizer_bytes
    # Of the four blocks only the inputs are left, and in backward one of them in recomputed form.
    for plain, full in in_head, in_backward:
        assert full.memory.components[SAVED_ACTIVATIONS] < plain.memory.components[SAVED_ACTIVATIONS] / 4
    again = [rehearsal.memory.components["recomputed activations"] for rehearsal in in_backward]
    assert again[0] == 0 < again[1] < in_backward[0].memory.components[SAVED_ACTIVATIONS] / 2
    tokens = 16 * MIDDLE["training.seq_len"]
    assert in_head[0].memory.components["logits"] >= tokens * MIDDLE["model.vocab_size"] * 4
    assert in_update.memory.components["gradients"] >= in_update.gradient_bytes
