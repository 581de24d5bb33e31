"""The number of chunks: fits and choices from made-up costs, and the number that a run measures, sets and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.events import Clock
from titanmoe.comm.collectives import Group
from titanmoe.moe import chunks as module
from titanmoe.moe.chunks import (
    MOST,
    Choice,
    Costs,
    LinearCost,
    choose_chunks,
    dummy_experts,
    fewest,
    fit,
    measure,
    pipelined,
)
from titanmoe.train.header import header_notes

ROWS = [1024, 2048, 4096, 8192]
FREE = LinearCost(0.0, 0.0)


def test_a_fit_finds_the_line_that_was_measured() -> None:
    got = fit(ROWS, [3e-4 + 2e-7 * rows for rows in ROWS])
    assert got == pytest.approx((3e-4, 2e-7), rel=1e-9)


def test_a_fit_weighs_errors_by_their_size() -> None:
    """The largest message 10% slow: a fit of plain squares gives a latency below zero here."""
    seconds = [1e-4 + 1e-7 * rows for rows in ROWS]
    seconds[-1] *= 1.1
    assert fit(ROWS, seconds) == pytest.approx((1e-4, 1e-7), rel=0.5)


@pytest.mark.parametrize(
    "rows, seconds, want",
    [
        ([1, 2, 4], [4.0, 2.0, 1.0], None),  # falls: all latency
        ([10], [3.0], (3.0, 0.0)),  # one size
        ([1, 2, 4], [1e-3, 4e-3, 16e-3], 0.0),  # grows faster than the rows: the latency is not below zero
    ],
)
def test_no_fitted_number_is_negative(rows: list[int], seconds: list[float], want: Any) -> None:
    got = fit(rows, seconds)
    assert got.latency >= 0 and got.slope >= 0 and max(got) > 0
    if want is None:
        assert got.slope == 0 and 1 < got.latency < 4
    elif want == 0.0:
        assert got.latency == 0 and 1e-3 < got.slope < 4e-3
    else:
        assert got == want


def test_pipelined_times_by_hand() -> None:
    """12 rows: there 1 s a row, products 2, back 1."""
    there, products, back = LinearCost(0, 1), LinearCost(0, 2), LinearCost(0, 1)
    assert pipelined(there, products, back, 12, 1) == 12 + 24 + 12
    # Two chunks: arrive at 6 and 12, done at 18 and 30, back at 24 and 36.
    assert pipelined(there, products, back, 12, 2) == 36
    # A slow wire carries everything one after the other, behind the first: done at 14 and 26, wire free at 24.
    assert pipelined(LinearCost(0, 2), LinearCost(0, 1 / 3), LinearCost(0, 2), 12, 2) == pytest.approx(48)
    # One second of latency in every message and product, three chunks.
    assert pipelined(LinearCost(1, 0), LinearCost(1, 0), LinearCost(1, 0), 12, 3) == 6


def test_latency_alone_keeps_one_chunk() -> None:
    costs = Costs(LinearCost(1e-3, 0), LinearCost(1e-3, 0), LinearCost(1e-3, 0), LinearCost(1e-3, 0))
    assert choose_chunks(costs, 4096).chunks == 1
    assert (
        choose_chunks(Costs(FREE, FREE, LinearCost(0, 1e-6), LinearCost(0, 2e-6)), 4096).chunks == 1
    )  # nothing to hide


def test_long_products_take_many_chunks_and_long_messages_two() -> None:
    """All messages but the first and the last hide behind products; on a busy wire two chunks hide all products."""
    wire = LinearCost(0.0, 1e-6)
    many = choose_chunks(Costs(wire, wire, LinearCost(0, 4e-6), LinearCost(0, 8e-6)), 4096)
    assert many.chunks > 3 and sum(many.seconds) < 0.85 * sum(many.whole)
    two = choose_chunks(Costs(wire, wire, wire, wire), 4096)
    assert two.chunks == 2 and sum(two.seconds) == pytest.approx(2 / 3 * sum(two.whole))


def test_forward_and_backward_are_weighed_together() -> None:
    """Forward's products have a launch cost that chunks pay again, backward's none."""
    wire = LinearCost(0.0, 1e-6)
    costs = Costs(wire, wire, LinearCost(20e-3, 1e-7), LinearCost(1e-5, 2e-6))
    choice = choose_chunks(costs, 4096)
    forward, backward = choice.alone
    assert forward == 1 < backward
    total = [costs.forward_s(4096, n) + costs.backward_s(4096, n) for n in range(1, MOST + 1)]
    assert choice.chunks == 1 + next(i for i, t in enumerate(total) if t <= 1.02 * min(total))
    # Forward twice, as under full recomputation, counts twice.
    weighed = [2 * costs.forward_s(4096, n) + costs.backward_s(4096, n) for n in range(1, MOST + 1)]
    assert choose_chunks(costs, 4096, 2.0).chunks == fewest(lambda n: weighed[n - 1]) == 1


def test_a_hair_is_not_worth_a_chunk() -> None:
    assert fewest(lambda n: 1.0 - 0.01 * (n > 1)) == 1
    assert fewest(lambda n: 1.0 - 0.05 * (n > 1)) == 2


def test_a_choice_shows_its_numbers() -> None:
    line = LinearCost(2e-5, 3e-8)
    choice = choose_chunks(Costs(line, line, line, line), 4096)
    text = str(choice)
    assert text.startswith(f"{choice.chunks} (forward alone ") and "there 20 us + 30 ns a row" in text
    assert choice.numbers()["costs"]["backward"] == {"latency": 2e-5, "slope": 3e-8}


CHOSEN = 3


def measured(changes: dict[str, Any]) -> tuple[Any, tuple[int, float], list[tuple[int, int]]]:
    """parity.measure with CHOSEN as the choice, whatever the (real) measurements; also what was requested and set."""
    from titanmoe.parallel import expert

    asked, trainers = [], []

    def chosen(costs: Costs, rows: int, forwards: float) -> Choice:
        assert min(max(line) for line in vars(costs).values()) > 0, costs
        asked.append((rows, forwards))
        return Choice(CHOSEN, (CHOSEN, CHOSEN), rows, costs, (1.0, 1.0), (1.0, 1.0))

    choose_chunks, expert.choose_chunks = expert.choose_chunks, chosen
    try:
        outcome = parity.measure(changes, steps=1, prepare=trainers.append)
    finally:
        expert.choose_chunks = choose_chunks
    (work,) = asked
    return outcome, work, [(d.chunks, getattr(d, "inner", d).chunks) for d in trainers[0].dispatchers]


@pytest.mark.parametrize(
    "changes, work",
    [
        ({"parallelism.tp": 2, "parallelism.experts.ep": 4}, (8 * 2, 1)),
        (
            {
                "moe.dispatcher": "hierarchical",
                "parallelism.node": 2,
                "parallelism.experts.ep": 2,
                "parallelism.experts.etp": 2,
                "activation_checkpoint.mode": "full",
            },
            (16 * 2 * 2, 2),
        ),
        (
            {"parallelism.experts.ep": 4, "moe.capacity_factor": 1.5, "moe.pad_to_capacity": True},
            (6 * 8, 1),  # bins of ceil(1.5 * 2 * 16 / 8) rows for 8 experts
        ),
    ],
    ids=["flat", "across_nodes", "padded"],
)
def test_a_chosen_count_is_set_and_changes_no_number(changes: dict[str, Any], work: tuple[int, float]) -> None:
    changes = changes | {"moe.overlap_chunks": -1}
    for outcome, asked, chunks in world.run(4, measured, changes):
        assert asked == work
        assert chunks == [(CHOSEN, CHOSEN)] * 2
        if outcome is not None:
            errors = parity.compare(outcome, parity.expected(changes, 4, steps=1), parity.read(changes, 4))
            assert max(errors.values()) <= parity.TOLERANCE["float64"], errors


def reported(ep: int, folder: str) -> tuple[Choice | None, dict[str, str]]:
    """A run of one step, the whole loop."""
    changes = {"model.vocab_size": 320, "training.steps": 1, "job.dump_folder": folder, "job.name": "run"}
    trainer = parity.make_trainer(changes | {"moe.overlap_chunks": -1, "parallelism.experts.ep": ep})
    chosen = trainer.chunks.chunks if trainer.chunks else 1
    assert [d.chunks for d in trainer.dispatchers] == [chosen] * 2
    trainer.train()
    return trainer.chunks, header_notes(trainer)


def test_header_and_events_show_the_choice(tmp_path: Path) -> None:
    everyone = world.run(2, reported, 2, str(tmp_path))
    assert len({choice.chunks for choice, _ in everyone}) == 1
    for choice, notes in everyone:
        assert notes["overlap chunks"] == str(choice)
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = (line for line in lines if line["kind"] == "chunks")
    choice = everyone[0][0]
    assert event["text"] == str(choice) and event["chunks"] == choice.chunks
    assert event["costs"]["backward"]["slope"] == choice.costs.backward.slope


def test_experts_of_one_rank_are_not_measured(tmp_path: Path) -> None:
    for choice, notes in world.run(2, reported, 1, str(tmp_path)):
        assert choice is None
        assert notes["overlap chunks"].startswith("1: no rows are sent in chunks")
    assert '"kind": "chunks"' not in (tmp_path / "run" / "events.jsonl").read_text()


def test_all_ranks_fit_the_numbers_of_the_slowest() -> None:
    everyone = world.run(2, slowest)
    assert everyone[0] == everyone[1]
    for line in vars(everyone[0]).values():
        assert line == pytest.approx((0.005 if line is everyone[0].forward else 1e-9, 0), abs=1e-8)


def slowest() -> Costs:
    config = parity.read({}, 2)
    both = Group(dist.group.WORLD.group_name, 2, dist.get_rank())
    experts = dummy_experts(config.model, config.moe, 2, 1, torch.float32, torch.device("cpu"))
    products, clock = experts.products, Clock(tick=1e-9)

    def slow(*work: Any) -> torch.Tensor:
        clock.now += 0.005 * both.rank
        return products(*work)

    experts.products = slow
    with mock.patch.object(module, "time", clock):
        return measure(experts, 64, both, both)
