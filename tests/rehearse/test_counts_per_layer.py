"""What one layer sends, multiplies, waits for and copies, as on a GPU: a change that makes it more shows here.

A rehearsal of four layers of which every other one is recomputed: layer 1 is plain, layer 2 is recomputed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.rehearse.small import config_of
from titanmoe.rehearse.code_site import GATHER
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse

PLAIN, AGAIN = "layers.1", "layers.2"
BASE = {"model.num_layers": 4, "training.global_batch_size": 4, "training.mixed_precision_param": "bfloat16"}
BASE |= {"parallelism.experts.ep": 2, "activation_checkpoint.mode": "full", "activation_checkpoint.every": 2}


class Counts(NamedTuple):
    rows: int
    """Messages among the experts' ranks: rows, their weights, counts."""
    products: int
    """Grouped products."""
    waits: int
    """Times the host waits for the device."""
    gathers: int
    """FSDP's messages that gather weights."""
    copies: int
    """Kernels that cast or copy weights around these messages."""


NONE = Counts(0, 0, 0, 0, 0)
# What a plain layer does in forward and in backward; a recomputed one in recomputation, and then in backward.
#
# alltoall, forward: counts, rows, weights, and rows back. Backward: gradients of the rows back, of the rows and of the
# weights. Products: 3, and for each of them 2 gradients. FSDP gathers the block and its experts (2 messages), each with
# a cast, a copy into the message and a copy out of it.
#
# A recomputed layer only sends its rows once more, in one message for each way there: numbers and weights are cached,
# and it ends before the experts' last product. Where the rows are saved too, it sends nothing.
TABLE: dict[str, tuple[dict[str, Any], Counts, Counts, Counts, Counts]] = {
    "alltoall": ({}, Counts(4, 3, 1, 2, 6), Counts(3, 6, 0, 2, 6), Counts(1, 2, 0, 0, 0), Counts(3, 6, 0, 2, 6)),
    "alltoall, moe again": (
        {"activation_checkpoint.mode": "moe"},
        Counts(4, 3, 1, 2, 6),
        Counts(3, 6, 0, 2, 6),
        Counts(1, 2, 0, 0, 0),
        Counts(3, 6, 0, 2, 6),
    ),
    "alltoall, selective": (  # nothing here is computed again
        {"activation_checkpoint.mode": "selective"},
        Counts(4, 3, 1, 2, 6),
        Counts(3, 6, 0, 2, 6),
        NONE,
        Counts(3, 6, 0, 2, 6),
    ),
    "halves": (  # each half is sent by itself, but weights are gathered once
        {"moe.overlap": "halves", "training.local_batch_size": 2, "training.global_batch_size": 8},
        Counts(8, 6, 2, 2, 6),
        Counts(6, 12, 0, 2, 6),
        Counts(2, 4, 0, 0, 0),
        Counts(6, 12, 0, 2, 6),
    ),
    "padded bins": (  # no counts
        {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True},
        Counts(3, 3, 0, 2, 6),
        Counts(3, 6, 0, 2, 6),
        Counts(1, 2, 0, 0, 0),
        Counts(3, 6, 0, 2, 6),
    ),
    "alltoall, edp = 1": (  # nothing to gather: the step has made copies of all experts' weights, gate and up as one
        {"parallelism.experts.ep": 4},
        Counts(4, 2, 1, 1, 3),
        Counts(3, 4, 0, 1, 3),
        Counts(1, 1, 0, 0, 0),
        Counts(3, 4, 0, 1, 3),
    ),
    "hierarchical, edp = 1": (  # both ways across nodes too, where choices travel with the rows
        {"moe.dispatcher": "hierarchical", "parallelism.experts.ep": 4, "parallelism.node": 2},
        Counts(9, 2, 2, 1, 3),
        Counts(6, 4, 0, 1, 3),
        Counts(2, 1, 0, 0, 0),
        Counts(6, 4, 0, 1, 3),
    ),
    "allgather": (  # choices, rows and weights are gathered, sums scattered
        {"moe.dispatcher": "allgather"},
        Counts(4, 3, 1, 2, 6),
        Counts(3, 6, 0, 2, 6),
        Counts(1, 2, 0, 0, 0),
        Counts(3, 6, 0, 2, 6),
    ),
    "symm_mem": (  # an all-gather of counts, which stay on the device; weights are sent again with the rows
        {"moe.dispatcher": "symm_mem"},
        Counts(4, 3, 0, 2, 6),
        Counts(3, 6, 0, 2, 6),
        Counts(2, 2, 0, 0, 0),
        Counts(3, 6, 0, 2, 6),
    ),
}
for name in ("alltoall", "halves", "padded bins", "hierarchical, edp = 1", "allgather", "symm_mem"):
    changes, forward, backward, again, after = TABLE[name]
    changes = changes | {"activation_checkpoint.mode": "full_except_dispatch"}
    TABLE[f"{name}, rows saved"] = changes, forward, backward, again._replace(rows=0), after


def counts(rehearsal: Rehearsal, layer: str, phase: str) -> Counts:
    def here(site: Any) -> bool:
        return (site.layer, site.phase) == (layer, phase)

    sent = [(rehearsal.groups[m.group].kind, m.op) for m in rehearsal.log.messages if here(m.site)]
    ran = [(operation, n) for operation, n in rehearsal.operations.items() if here(operation.site)]
    return Counts(
        sum(kind == "dispatch" for kind, _ in sent),
        sum(n for operation, n in ran if operation.name == "_grouped_mm"),
        sum(map(here, rehearsal.log.syncs)),
        sent.count(("shards", "all-gather")),
        sum(n for operation, n in ran if operation.site.region == GATHER),
    )


@pytest.mark.parametrize("name", TABLE)
def test_a_layer_does_what_the_table_says(name: str) -> None:
    changes, forward, backward, again, after = TABLE[name]
    rehearsal = rehearse(config_of(BASE | changes, 4, "h100"), 4, 0, "h100")
    seen = {
        (layer, phase): counts(rehearsal, layer, phase)
        for layer in (PLAIN, AGAIN)
        for phase in ("forward", "recomputed", "backward")
    }
    assert seen == {
        (PLAIN, "forward"): forward,
        (PLAIN, "recomputed"): NONE,
        (PLAIN, "backward"): backward,
        (AGAIN, "forward"): forward,
        (AGAIN, "recomputed"): again,
        (AGAIN, "backward"): after,
    }


@pytest.mark.parametrize(("samples", "copies"), [(1, 0), (2, 4)])
def test_pieces_over_tp_of_one_sample_are_not_copied_together(samples: int, copies: int) -> None:
    """Of two samples what is gathered and what is scattered is, in forward and in backward."""
    changes = {"parallelism.tp": 2, "training.local_batch_size": samples, "activation_checkpoint.mode": "none"}
    rehearsal = rehearse(config_of(BASE | changes, 4, "h100"), 4, 0, "h100")
    moved = [n for operation, n in rehearsal.operations.items() if is_joined_over_tp(operation)]
    assert sum(moved) == copies


def is_joined_over_tp(operation: Any) -> bool:
    site = operation.site
    return operation.name == "cat" and site.layer == PLAIN and site.file == "models/attention.py"
