"""Linear attention under every kind of mapping, against the recurrence position by position."""

from __future__ import annotations

import pytest

from tests import parity, reference
from tests.support import linear_family, reference_linear

FAMILY = f"{linear_family.__name__}:FAMILY"
OWN = dict(linear_key_heads=2, linear_value_heads=4, linear_key_dim=4, linear_value_dim=6, conv_width=4)
BASE = {"model.family": FAMILY, "model.own": OWN, "training.global_batch_size": 4, "training.seq_len": 32}
CP, PLACEMENT, KIND = "parallelism.cp", "parallelism.cp_placement", "parallelism.cp_kind"
TP, PP, EP = "parallelism.tp", "parallelism.pp", "parallelism.experts.ep"
MODE = "activation_checkpoint.mode"

reference.OWN_LAYERS[FAMILY] = reference.OwnLayer(
    linear_family.is_linear, reference_linear.shapes, reference_linear.mix, reference_linear.BEGIN
)


def own(**changes) -> dict:
    return {"model.own": OWN | changes}


@pytest.mark.parametrize(
    ("size", "mapping", "documents"),
    [
        (1, {}, False),
        (1, own(linear_value_heads=2, conv_width=1), True),
        (2, {TP: 2, MODE: "selective"}, True),
        (2, {CP: 2, PLACEMENT: "contiguous"}, True),
        (2, {CP: 2, KIND: "allgather", MODE: "selective"}, True),
        (2, {CP: 2, KIND: "ulysses", MODE: "full", **own(linear_gate="gla")}, True),
        (2, {CP: 2, "compile.enable": True, "compile.backend": "aot_eager", "model.num_layers": 1}, True),
        (2, {TP: 2, EP: 2, MODE: "moe", **own(linear_gate="gla")}, False),
        (4, {CP: 4, "training.local_batch_size": 2}, True),
        (4, {CP: 4, PLACEMENT: "contiguous", MODE: "full"}, False),
        (4, {CP: 4, EP: 4, "training.seq_len": 16}, True),  # runs shorter than what a convolution sees
        (4, {TP: 2, CP: 2, EP: 4, "moe.overlap_halves": True, "training.local_batch_size": 2}, True),
        (4, {PP: 2, CP: 2, "pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4}, True),
    ],
)
def test_no_mapping_changes_a_number(size, mapping, documents):
    parity.check(size, BASE | mapping, documents=documents, steps=1)
