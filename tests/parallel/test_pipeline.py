"""Stages, what a schedule demands, its bubble; schedules from files; forward alone."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from tests import parity, world
from titanmoe.config.schema import Config, Model, Parallelism, Pipeline, Training
from titanmoe.fold.degrees import Fold
from titanmoe.models.count import layer_flops
from titanmoe.parallel.pipeline import bubble, problems, read_csv, single_order, split_layers, stage_ranks


def write(path: Path, rows: list[list[str]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def table(pp: int, microbatches: int, schedule: str = "1F1B") -> list[list[str]]:
    return [[str(action) for action in row] for row in single_order(schedule, pp, microbatches).values()]


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
            held = list(itertools.accumulate(1 if "F" in action else -1 for action in row))
            assert max(held) == (m if schedule == "GPipe" else min(m, p - rank))


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    order = single_order("GPipe", 2, 2)
    order[1] = order[1][::-1]
    with pytest.raises(ValueError, match="waits for itself"):
        bubble(order, 2)


def test_what_a_pair_makes_is_there_when_both_halves_are_done() -> None:
    """The pair takes 3, and the first rank waits for the backward in it until then."""
    order = {
        0: ["0F0", "0F1", "0B0", "0B1"],
        1: ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"],
    }
    from_str = torch_schedules._Action.from_str
    played = {rank: [from_str(action) for action in row] for rank, row in order.items()}
    # rank 0: F F, then until 5 nothing, then B and B; rank 1 from 1 on: F, the pair until 5, B until 7
    assert bubble(played, 2) == pytest.approx(1 - 12 / (2 * 9))


# ---- stages


def cost_of(model: Model, seq_len: int, parts: list[range]) -> int:
    """Of the costliest stage: FLOPs per token of its layers, of the head on the last, the lookup on the first."""
    layer, head = layer_flops(model, seq_len)
    costs = [sum(layer[i] for i in part) for part in parts]
    costs[0] += 2 * model.dim
    costs[-1] += head
    return max(costs)


def partitions(n: int, parts: int) -> list[list[range]]:
    return [
        [range(a, b) for a, b in itertools.pairwise((0, *cuts, n))]
        for cuts in itertools.combinations(range(1, n), parts - 1)
    ]


@given(
    st.integers(1, 8),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([8, 300, 5000, 50000]),
    st.sampled_from([1, 64, 2000]),
)
def test_no_other_split_has_a_cheaper_worst_stage(
    layers: int, dense: int, every: int, vocab: int, dense_hidden: int
) -> None:
    model = Model(
        num_layers=layers, num_dense_layers=dense, moe_every=every, vocab_size=vocab, dense_hidden=dense_hidden
    )
    for stages in range(1, layers + 1):
        split = split_layers(model, 32, stages, [])
        assert [i for part in split for i in part] == list(range(layers)) and len(split) == stages and all(split)
        assert cost_of(model, 32, split) == min(cost_of(model, 32, parts) for parts in partitions(layers, stages))


def test_the_head_makes_the_last_stage_shorter() -> None:
    def sizes(vocab: int) -> list[int]:
        return [len(part) for part in split_layers(Model(num_layers=12, vocab_size=vocab), 64, 3, [])]

    assert sizes(8) == [4, 4, 4]
    layer, head = layer_flops(Model(num_layers=1, vocab_size=1), 64)
    assert sizes(3 * layer[0] // head)[-1] < 4


def test_an_explicit_split_is_taken_as_it_is() -> None:
    assert split_layers(Model(num_layers=6), 64, 3, [1, 3, 2]) == [range(1), range(1, 4), range(4, 6)]
    assert split_layers(Model(num_layers=4), 64, 3, [0, 4, 0]) == [range(0), range(4), range(4, 4)]


def config(pp: int = 2, layers: int = 4, pipeline: dict[str, Any] | None = None, **parallelism: Any) -> Config:
    return Config(
        model=Model(num_layers=layers),
        parallelism=Parallelism(pp=pp, **parallelism),
        pipeline=Pipeline(**(pipeline or {})),
        training=Training(local_batch_size=2),
    )


def fold(pp: int) -> Fold:
    return Fold(pp * 3, pp, 1, 3, 1, 1, 1, 3, 1, 1)


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
def test_stages_lie_in_loops_or_in_a_v(schedule: str, virtual: int, ranks: list[int]) -> None:
    assert stage_ranks(Pipeline(schedule=schedule, virtual_stages=virtual), 3) == ranks


def test_a_file_says_where_its_stages_lie(tmp_path: Path) -> None:
    path = write(
        tmp_path / "v.csv", [["0F0", "", "", "3F0", "3B0", "", "", "0B0"], ["", "1F0", "2F0", "", "2B0", "1B0"]]
    )
    assert stage_ranks(Pipeline(schedule_csv=path), 2) == [0, 1, 1, 0]
    assert [[str(cell) if cell else "" for cell in row] for row in read_csv(path)][1][:3] == ["", "1F0", "2F0"]


# ---- what cannot run


@pytest.mark.parametrize(
    "options, microbatches, message",
    [
        (dict(virtual_stages=2), 4, "pipeline.schedule = 1F1B has one stage per rank, virtual_stages is 2: use 1"),
        (dict(schedule="GPipe", virtual_stages=3), 4, "GPipe has one stage per rank, virtual_stages is 3"),
        (dict(schedule="ZBVZeroBubble", virtual_stages=3), 4, "has 2 stages per rank, virtual_stages is 3: use 2"),
        (
            dict(),
            1,
            "1F1B on 2 ranks needs at least 2 microbatches, the step has 1: raise training.global_batch_size to 12",
        ),
        (dict(schedule="DualPipeV"), 3, "DualPipeV on 2 ranks needs at least 4 microbatches, the step has 3: raise"),
        (
            dict(schedule="Interleaved1F1B"),
            5,
            "Interleaved1F1B on 2 ranks needs microbatches in whole rounds: 5 is not a multiple of 2; set "
            "training.global_batch_size to 24",
        ),
        (dict(layers_per_stage=[1, 2, 1]), 4, "layers_per_stage = [1, 2, 1] must name 2 stages that sum to"),
        (dict(layers_per_stage=[1, 2]), 4, "model.num_layers = 4"),
        (dict(schedule="LoopedBFS", layers_per_stage=[2, 0, 1, 1]), 4, "inner ones with at least one layer"),
        (dict(schedule="Interleaved1F1B", virtual_stages=3), 4, "6 pipeline stages for model.num_layers = 4: lower"),
    ],
)
def test_each_law_is_told_with_numbers_and_a_fix(options: dict[str, Any], microbatches: int, message: str) -> None:
    (problem,) = problems(config(pipeline=options), fold(2), microbatches)
    assert message in problem


def test_freed_weights_and_a_split_backward_do_not_go_together() -> None:
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        (problem,) = problems(config(pipeline=dict(schedule=schedule), reshard_after_forward="always"), fold(2), 4)
        assert f"pipeline.schedule = {schedule} splits backward in two" in problem
    assert problems(config(reshard_after_forward="always"), fold(2), 4) == []


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_what_runs_has_no_problems(schedule: str) -> None:
    assert problems(config(pipeline=dict(schedule=schedule)), fold(2), 4) == []


def test_without_a_pipeline_nothing_is_asked() -> None:
    assert problems(config(pp=1, pipeline=dict(schedule_csv="absent", virtual_stages=9)), fold(1), 1) == []


def test_a_file_is_held_to_the_step_and_the_ranks(tmp_path: Path) -> None:
    def of(pp: int, microbatches: int, path: str) -> list[str]:
        return problems(config(pp, pipeline=dict(schedule_csv=path)), fold(pp), microbatches)

    path = write(tmp_path / "two.csv", table(2, 4))
    assert of(2, 4, path) == []
    rows, batches = of(3, 5, path)
    assert "has 2 rows, one per pipeline rank; parallelism.pp is 3" in rows
    assert "runs 4 microbatches, the step has 5: set training.global_batch_size to 24" in batches
    assert "cannot be read: No such file" in of(2, 4, str(tmp_path / "absent.csv"))[0]
    assert "is not a schedule" in of(2, 4, write(tmp_path / "words.csv", [["forward", "back"]]))[0]


# ---- on ranks


STEP = {"parallelism.pp": 2, "training.global_batch_size": 4}


def test_a_schedule_from_a_file_agrees(tmp_path: Path) -> None:
    path = write(tmp_path / "1f1b.csv", table(2, 4))
    mapping = {"parallelism.tp": 2, "parallelism.experts.ep": 2, "pipeline.schedule_csv": path}
    parity.check(4, STEP | mapping)


def forward_alone(changes: dict[str, Any]) -> tuple[float, float, dict[str, torch.Tensor], float]:
    """The loss without backward, then that of a training step with its gradients; and the schedule's bubble."""
    from titanmoe.comm.collectives import all_reduce
    from titanmoe.parallel.batch import cut

    trainer = parity.make_trainer(changes, loader=parity.samples())
    batches = trainer.loader.next_step()
    totals = trainer.count(batches)
    for moe in trainer.moe_layers.values():
        moe.begin_step(1, totals.tokens, trainer.loader.global_batch_size)
    slices = [cut(b, m, trainer.meshes, trainer.placement, trainer.device) for m, b in enumerate(batches)]
    losses = []
    for _ in range(2):
        losses.append(trainer.engine.run(slices, totals.labels, backward=False))
        assert not losses[-1].requires_grad
        assert all(p.grad is None for p in trainer.parameters.values()), "a gradient without backward"
    alone, again = (all_reduce(loss, trainer.meshes.world) / trainer.meshes.tp.size for loss in losses)
    assert torch.equal(alone, again)
    training, _ = trainer.forward_backward(batches, totals)
    trainer.finish_gradients()
    grads = parity.whole({name: p.grad for name, p in trainer.parameters.items()}, dist.get_rank(), trainer.fold)
    return alone.item(), training.item(), grads, trainer.engine.bubble


SCHEDULES = {
    "no_pipeline": {"parallelism.tp": 2},
    "GPipe": {"parallelism.pp": 2, "pipeline.schedule": "GPipe"},
    "1F1B": {"parallelism.pp": 2},
    "Interleaved1F1B": {"parallelism.pp": 2, "pipeline.schedule": "Interleaved1F1B"},
    "InterleavedZeroBubble": {"parallelism.pp": 2, "pipeline.schedule": "InterleavedZeroBubble"},
    "ZBVZeroBubble": {"parallelism.pp": 2, "pipeline.schedule": "ZBVZeroBubble"},
    "DualPipeV": {"parallelism.pp": 2, "pipeline.schedule": "DualPipeV"},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_alone_gives_the_loss_and_leaves_no_trace(schedule: str) -> None:
    changes = SCHEDULES[schedule] | {"training.global_batch_size": 4, "model.num_layers": 4}
    alone, training, grads, idle = world.run(2, forward_alone, changes)[0]
    want = parity.expected(changes, 2).steps[0]
    assert alone == training == pytest.approx(want.loss, rel=1e-12)
    assert parity.error(grads, want.grads)[0] <= parity.TOLERANCE["float64"]
    # 2 ranks, 4 microbatches: (p - 1) / (v * m + p - 1) with v stages per rank
    known = {"no_pipeline": 0, "GPipe": 1 / 5, "1F1B": 1 / 5, "Interleaved1F1B": 1 / 9}
    if schedule in known:
        assert idle == pytest.approx(known[schedule])
    else:
        assert idle < 1 / 9


BAD = {
    "a stage is missing": [["0F0", "0F1", "0B0", "0B1"], ["2F0", "2F1", "2B0", "2B1"]],
    "a stage on two ranks": [["0F0", "0F1", "0B0", "0B1", "1F0"], ["1F0", "1F1", "1B0", "1B1"]],
    "it waits for itself": [table(2, 2)[0], table(2, 2)[1][::-1]],
    "a pair waits for itself": [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1F1", "1B0", "1B1"]],
    "a microbatch is missing": [["0F1", "0B1"], ["1F1", "1B1"]],
    "no backward": [["0F0", "0F1"], ["1F0", "1F1"]],
}


@pytest.mark.parametrize("rows", BAD.values(), ids=BAD)
def test_a_file_that_cannot_run_is_refused(rows: list[list[str]], tmp_path: Path) -> None:
    path = write(tmp_path / "bad.csv", rows)
    assert problems(config(pipeline=dict(schedule_csv=path)), fold(2), 2)
