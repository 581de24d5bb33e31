"""Schedules without torch: which ranks have which stages, the bubble, the laws; files are read as torch reads them."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanmoe.config.schema import Config, Model, Parallelism, Pipeline, Training
from titanmoe.fold.pipeline_schedules import (
    SCHEDULES,
    Action,
    bubble,
    channels,
    parse_cell,
    read_csv,
    single_order,
    stage_ranks,
)
from titanmoe.fold.schedule_laws import schedule_violations


def write(path: Path, rows: list[list[str]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def table(pp: int, microbatches: int, schedule: str = "1F1B") -> list[list[str]]:
    return [[str(*cell) for cell in row] for row in single_order(schedule, pp, microbatches)]


def config(pp: int = 2, layers: int = 4, pipeline: dict[str, Any] | None = None, **parallelism: Any) -> Config:
    return Config(
        model=Model(num_layers=layers),
        parallelism=Parallelism(pp=pp, **parallelism),
        pipeline=Pipeline(**(pipeline or {})),
        training=Training(local_batch_size=2),
    )


# ---- bubble


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 6), st.integers(0, 8))
def test_the_bubble_of_single_stage_schedules_is_the_formula(schedule: str, p: int, more: int) -> None:
    m = p + more
    assert bubble(single_order(schedule, p, m), p) == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(1, 5), st.integers(1, 8))
def test_single_order_runs_every_microbatch_forward_and_then_backward(p: int, m: int) -> None:
    for schedule in ("GPipe", "1F1B"):
        for rank, row in enumerate(table(p, m, schedule)):
            assert sorted(row) == sorted(f"{rank}{kind}{i}" for kind in "FB" for i in range(m))
            assert all(row.index(f"{rank}F{i}") < row.index(f"{rank}B{i}") for i in range(m))
            in_flight = list(itertools.accumulate(1 if "F" in action else -1 for action in row))
            assert max(in_flight) == (m if schedule == "GPipe" else min(m, p - rank))


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    order = single_order("GPipe", 2, 2)
    order[1] = order[1][::-1]
    with pytest.raises(ValueError, match="the schedule deadlocks"):
        bubble(order, 2)


def test_what_a_pair_makes_is_there_when_both_halves_are_done() -> None:
    """The pair takes 3, and the first rank waits for the backward in it until then."""
    rows = ["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]
    played = [[parse_cell(text) for text in row] for row in rows]
    # rank 0: F F, then until 5 nothing, then B and B; rank 1 from 1 on: F, the pair until 5, B until 7
    assert bubble(played, 2) == pytest.approx(1 - 12 / (2 * 9))


# ---- stages


@pytest.mark.parametrize(
    "schedule, virtual, ranks",
    [
        ("GPipe", -1, [0, 1, 2]),
        ("1F1B", 1, [0, 1, 2]),
        ("LoopedBFS", -1, [0, 1, 2, 0, 1, 2]),
        ("Interleaved1F1B", 3, [0, 1, 2, 0, 1, 2, 0, 1, 2]),
        ("InterleavedZeroBubble", 2, [0, 1, 2, 0, 1, 2]),
        ("ZBVZeroBubble", -1, [0, 1, 2, 2, 1, 0]),
        ("DualPipeV", 2, [0, 1, 2, 2, 1, 0]),
    ],
)
def test_stages_form_loops_or_a_v(schedule: str, virtual: int, ranks: list[int]) -> None:
    options = Pipeline(schedule=schedule, virtual_stages=virtual)
    assert stage_ranks(options, 3) == ranks and stage_ranks(options, 1) == [0]


def test_a_file_says_where_its_stages_lie(tmp_path: Path) -> None:
    path = write(
        tmp_path / "v.csv", [["0F0", "", "", "3F0", "3B0", "", "", "0B0"], ["", "1F0", "2F0", "", "2B0", "1B0"]]
    )
    assert stage_ranks(Pipeline(schedule_csv=path), 2) == [0, 1, 1, 0]
    assert read_csv(path)[1][:3] == [(), (Action(1, "F", 0),), (Action(2, "F", 0),)]


@given(st.lists(st.integers(0, 7), min_size=2, max_size=16))
def test_a_channel_goes_one_way_and_to_one_rank(ranks: list[int]) -> None:
    numbers = channels(ranks)
    sent = {ends for a, b in itertools.pairwise(ranks) if a != b for ends in ((a, b), (b, a))}
    assert set(numbers) == sent
    assert set(numbers.values()) == set(range(len(set(numbers.values()))))
    for (ends, number), (other_ends, other_number) in itertools.combinations(numbers.items(), 2):
        assert number != other_number or not set(ends) & set(other_ends)


@pytest.mark.parametrize(("pp", "count"), [(2, 2), (3, 6), (4, 4), (7, 6), (8, 4)])
def test_few_channels_are_enough(pp: int, count: int) -> None:
    for schedule in SCHEDULES:
        numbers = channels(stage_ranks(Pipeline(schedule=schedule), pp))
        loops = SCHEDULES[schedule].stages_per_rank > 1 and not SCHEDULES[schedule].v_shape
        assert len(set(numbers.values())) == (count if loops else min(count, 4))


# ---- what cannot run


@pytest.mark.parametrize(
    "options, microbatches, message",
    [
        (dict(virtual_stages=2), 4, "pipeline.schedule = 1F1B has one stage per rank, but virtual_stages is 2: use 1"),
        (dict(schedule="GPipe", virtual_stages=3), 4, "GPipe has one stage per rank, but virtual_stages is 3"),
        (dict(schedule="ZBVZeroBubble", virtual_stages=3), 4, "has 2 stages per rank, but virtual_stages is 3: use 2"),
        (
            dict(),
            1,
            "1F1B on 2 ranks needs at least 2 microbatches, but the step has 1: raise training.global_batch_size to 12",
        ),
        (dict(schedule="DualPipeV"), 3, "DualPipeV on 2 ranks needs at least 4 microbatches, but the step has 3"),
        (
            dict(schedule="Interleaved1F1B"),
            5,
            "Interleaved1F1B on 2 ranks needs microbatches in full rounds: 5 is not a multiple of 2; set "
            "training.global_batch_size to 24",
        ),
        (dict(layers_per_stage=[1, 2, 1]), 4, "layers_per_stage = [1, 2, 1] must name 2 stages that sum to"),
        (dict(layers_per_stage=[1, 2]), 4, "model.num_layers = 4"),
        (dict(schedule="LoopedBFS", layers_per_stage=[2, 0, 1, 1]), 4, "inner ones with at least one layer"),
        (
            dict(schedule="Interleaved1F1B", virtual_stages=3),
            4,
            "6 pipeline stages are too many for model.num_layers = 4",
        ),
    ],
)
def test_each_broken_law_is_reported_with_numbers_and_a_fix(
    options: dict[str, Any], microbatches: int, message: str
) -> None:
    (problem,) = schedule_violations(config(pipeline=options), 2, 3, microbatches)
    assert message in problem


def test_freed_weights_and_a_split_backward_do_not_go_together() -> None:
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        (problem,) = schedule_violations(
            config(pipeline=dict(schedule=schedule), reshard_after_forward="always"), 2, 3, 4
        )
        assert f"pipeline.schedule = {schedule} splits backward in two" in problem
    assert schedule_violations(config(reshard_after_forward="always"), 2, 3, 4) == []


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_what_runs_has_no_problems(schedule: str) -> None:
    assert schedule_violations(config(pipeline=dict(schedule=schedule)), 2, 3, 4) == []


def test_without_a_pipeline_nothing_is_asked() -> None:
    assert schedule_violations(config(pp=1, pipeline=dict(schedule_csv="absent", virtual_stages=9)), 1, 3, 1) == []


def test_a_file_is_held_to_the_step_and_the_ranks(tmp_path: Path) -> None:
    def of(pp: int, microbatches: int, path: str) -> list[str]:
        return schedule_violations(config(pp, pipeline=dict(schedule_csv=path)), pp, 3, microbatches)

    path = write(tmp_path / "two.csv", table(2, 4))
    assert of(2, 4, path) == []
    rows, batches = of(3, 5, path)
    assert "has 2 rows and needs one per pipeline rank: parallelism.pp is 3" in rows
    assert "runs 4 microbatches, but the step has 5: set training.global_batch_size to 24" in batches
    assert "cannot be read: No such file" in of(2, 4, str(tmp_path / "absent.csv"))[0]
    assert "is not a schedule" in of(2, 4, write(tmp_path / "words.csv", [["forward", "back"]]))[0]
    assert "is not a schedule: it is not CSV" in of(2, 4, write(tmp_path / "long.csv", [["0" * 150_000]]))[0]
    (far,) = of(2, 4, write(tmp_path / "far.csv", [["0F0", "0B0", "0F99999999"], ["1F0", "1B0"]]))
    assert "runs 100000000 microbatches, but the step has 4" in far  # said once, and not of each microbatch


BAD = {
    "a stage is missing": [["0F0", "0F1", "0B0", "0B1"], ["2F0", "2F1", "2B0", "2B1"]],
    "a stage on two ranks": [["0F0", "0F1", "0B0", "0B1", "1F0"], ["1F0", "1F1", "1B0", "1B1"]],
    "it deadlocks": [table(2, 2)[0], table(2, 2)[1][::-1]],
    "a pair deadlocks": [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1F1", "1B0", "1B1"]],
    "a microbatch is missing": [["0F1", "0B1"], ["1F1", "1B1"]],
    "no backward": [["0F0", "0F1"], ["1F0", "1F1"]],
}


@pytest.mark.parametrize("rows", BAD.values(), ids=BAD)
def test_a_file_that_cannot_run_is_refused(rows: list[list[str]], tmp_path: Path) -> None:
    path = write(tmp_path / "bad.csv", rows)
    assert schedule_violations(config(pipeline=dict(schedule_csv=path)), 2, 3, 2)


@pytest.mark.parametrize("text", ["0F0", "12B3", " 4I5", "6W7 ", "(0F4;3B1)OVERLAP_F_B", "", "1UNSHARD", "3SEND_F1"])
def test_cells_are_read_as_torch_reads_them(text: str) -> None:
    from torch.distributed.pipelining.schedules import _Action

    from titanmoe.parallel.schedule_tables import cell_of

    assert parse_cell(text) == cell_of(_Action.from_str(text))


@pytest.mark.parametrize("text", ["F0", "0F", "0G1", "0F0 1", "(0F0)OVERLAP_F_B", "(0F0;1UNSHARD)OVERLAP_F_B"])
def test_a_text_that_is_not_a_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an action|does not overlap"):
        parse_cell(text)


def test_torch_has_every_schedule() -> None:
    from torch.distributed.pipelining import schedules

    assert all(hasattr(schedules, f"Schedule{name}") for name in SCHEDULES)
