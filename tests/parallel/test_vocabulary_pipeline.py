"""Embedding and head over all stages of a pipeline: the same numbers, passes at the same places of every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests import parity
from titanmoe.fold.legality import violations
from titanmoe.fold.pipeline_schedules import Cell, single_order
from titanmoe.fold.vocabulary_passes import insert_passes
from titanmoe.plan.schedule_cost import schedule_rows

SHARED = {"parallelism.pp": 2, "parallelism.vocab": "pipeline"}
ODD, TIED = {"model.vocab_size": 49}, {"model.tie_embeddings": True}

# ---- passes in a schedule's table


def passes(row: list[Cell]) -> list[str]:
    return [str(action) for (action,) in row if action.does in "ELD"]


@pytest.mark.parametrize(
    ("schedule", "pp", "virtual", "microbatches"),
    [("GPipe", 2, 1, 3), ("1F1B", 4, 1, 9), ("1F1B", 2, 1, 2), ("Interleaved1F1B", 4, 2, 8)],
)
def test_each_rank_has_all_passes_in_the_same_order(schedule: str, pp: int, virtual: int, microbatches: int) -> None:
    plain = [[cell for cell in row if cell] for row in schedule_rows(schedule, pp, virtual, microbatches)]
    stages = pp * virtual
    rows = insert_passes(plain, stages)
    assert [[cell for cell in row if cell[0].does in "FB"] for row in rows] == plain
    assert all(passes(row) == passes(rows[0]) for row in rows)
    assert sorted(passes(rows[0])) == sorted(
        f"{stage}{does}{m}" for m in range(microbatches) for stage, does in ((0, "E"), (stages - 1, "L"), (0, "D"))
    )
    for rank, stage, order in (0, 0, "EFBD"), (pp - 1, stages - 1, "FLB"):
        place = {str(action): i for i, (action,) in enumerate(rows[rank])}
        for m in range(microbatches):
            steps = [place[f"{stage}{does}{m}"] for does in order]
            assert steps == sorted(steps)


def test_1f1b_embeds_no_microbatch_before_it_is_needed() -> None:
    (first, *_) = insert_passes(single_order("1F1B", 2, 5), 2)
    order = [str(action) for (action,) in first]
    assert order[:4] == ["0E0", "0E1", "0F0", "0F1"]
    assert order.index("1L0") < order.index("0E2") < order.index("0F2")


# ---- parity

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "GPipe": (2, {"pipeline.schedule": "GPipe"}),
    "1F1B": (2, {}),
    "Interleaved1F1B": (2, {"pipeline.schedule": "Interleaved1F1B", "model.num_layers": 4}),
    "odd vocabulary with tp": (4, ODD | {"parallelism.tp": 2}),
    "tied, GPipe": (4, ODD | TIED | {"parallelism.tp": 2, "pipeline.schedule": "GPipe"}),
    "tied, four stages, slices": (4, TIED | {"parallelism.pp": 4, "model.num_layers": 4, "training.loss_chunks": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_plain_model(case: str) -> None:
    size, changes = CASES[case]
    parity.check(size, SHARED | changes)


# ---- laws


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"parallelism.pp": 1}, "parallelism.pp = 1"),
        ({"pipeline.schedule": "DualPipeV", "model.num_layers": 8}, "schedule = DualPipeV"),
        ({"model.vocab_size": 9, "parallelism.tp": 4}, "the last would have none"),
        ({"model.mtp_depth": 1}, "model.mtp_depth = 1"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], what: str) -> None:
    config = copy.deepcopy(parity.read({}, 1))
    for path, value in (SHARED | changes).items():
        table, name = path.split(".")
        setattr(getattr(config, table), name, value)
    found = [one for one in violations(config, 8) if "parallelism.vocab" in one]
    assert len(found) == 1 and what in found[0] and "use" in found[0]
