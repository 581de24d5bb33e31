"""What a rank's memory holds: against torch's allocator on real ranks, and by component."""

from __future__ import annotations

from typing import Any

import pytest

from tests import world
from tests.rehearse import allocated
from tests.rehearse.small import config_of
from titanmoe.rehearse.memory import COMPONENTS, Memory
from titanmoe.rehearse.world import rehearse

MIDDLE: dict[str, Any] = {
    **{"model.dim": 128, "model.head_dim": 16, "model.expert_hidden": 128, "model.vocab_size": 1024},
    **{"model.num_kv_heads": 4, "training.seq_len": 128, "training.global_batch_size": 8},
}
EP4 = {"parallelism.experts.ep": 4}
PP = {"parallelism.pp": 2, "parallelism.experts.ep": 2, "pipeline.schedule": "1F1B", "model.num_layers": 4}
MAPPINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, MIDDLE | {"training.global_batch_size": 2, "training.local_batch_size": 2}),
    "tiny tp2 ep4": (4, {"parallelism.tp": 2} | EP4),
    "tp2 ep4 full": (4, MIDDLE | {"parallelism.tp": 2, "activation_checkpoint.mode": "full"} | EP4),
    "cp2 ep2 etp2": (4, MIDDLE | {"parallelism.cp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2}),
    "pp2 ep2": (4, MIDDLE | PP),
    "dp4 edp4 selective": (4, MIDDLE | {"activation_checkpoint.mode": "selective"}),
}


def rehearsed(changes: dict[str, Any], ranks: int, rank: int, steps: int = 1) -> Memory:
    return rehearse(config_of(changes, ranks, "cpu"), ranks, rank, "cpu", steps=steps).memory


def over(memory: Memory) -> int:
    return memory.peak - memory.before


@pytest.mark.parametrize("name", MAPPINGS)
def test_the_peak_is_that_of_real_ranks(name: str) -> None:
    ranks, changes = MAPPINGS[name]
    real = world.run(ranks, allocated.peak, changes, ranks)
    last = ranks - 1
    assert over(rehearsed(changes, ranks, last, 2)) == pytest.approx(real[last], rel=0.05)
