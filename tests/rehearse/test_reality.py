"""A rehearsal against real ranks: every message, byte, split size and line, in the order of the host."""

from __future__ import annotations

from typing import Any

import pytest

from tests import world
from tests.rehearse.real import measured, rehearsed
from tests.rehearse.small import told

WIDE = {"model.num_layers": 2, "training.global_batch_size": 8}
NARROW = {"training.mixed_precision_param": "bfloat16"}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp and ep": (4, "cpu", {"parallelism.tp": 2, "parallelism.experts.ep": 4}),
    "as on GPUs": (4, "h100", {"parallelism.tp": 2, "parallelism.experts.ep": 4, "moe.overlap_chunks": 2}),
    "pipeline": (4, "h100", {"parallelism.pp": 2, "parallelism.experts.ep": 2, "moe.aux_loss": 0.01}),
    "ring": (4, "cpu", {"parallelism.cp": 2, "parallelism.cp_kind": "ring", "parallelism.experts.ep": 2}),
    "gathered": (4, "cpu", {"parallelism.experts.ep": 4, "moe.dispatcher": "allgather"}),
    "nodes": (
        8,
        "h100",
        {"parallelism.experts.ep": 8, "parallelism.node": 4, "moe.dispatcher": "hierarchical", "moe.overlap_chunks": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_message_is_the_real_one(name: str) -> None:
    size, hardware, changes = CASES[name]
    real = world.run(size, measured, WIDE | changes, hardware, timeout=25)
    for rank in (0, size - 1):
        found = rehearsed(WIDE | changes, size, rank, hardware)
        messages, weights, moments = real[rank]
        ours = told(found.log, found.groups)
        first = next((i for i, (a, b) in enumerate(zip(ours, messages, strict=False)) if a != b), None)
        assert first is None, f"message {first}: rehearsed {ours[first]}, real {messages[first]}"
        assert len(ours) == len(messages)
        assert (found.parameter_bytes, found.optimizer_bytes) == (weights, moments)
