"""Which layers a stage has; schedules from files; forward without backward."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input

from tests import parity, world
from tests.fold.test_pipeline_schedules import table, write
from tests.rehearse.small import config_of
from titanmoe.comm.collectives import to_local
from titanmoe.config.schema import Model, Pipeline
from titanmoe.models.count import layer_flops
from titanmoe.models.stages import split_layers
from titanmoe.parallel import pipeline_stage
from titanmoe.parallel.pipeline_stage import Stage, add_weight_gradients
from titanmoe.parallel.schedule_tables import gather_each_stage_once, make_schedule
from titanmoe.rehearse.rehearsal import rehearse

# ---- stages


def cost_of(model: Model, seq_len: int, parts: list[range]) -> int:
    """The cost of the costliest stage: FLOPs per token of its layers, of the head on the last, the
    lookup on the first.
    """
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
    assert split_layers(Model(num_layers=6), 64, 1, [1, 3, 2]) == [range(6)], "without a pipeline"
    assert split_layers(Model(num_layers=4), 64, 3, [0, 4, 0]) == [range(0), range(4), range(4, 4)]


# ---- on ranks


STEP = {"parallelism.pp": 2, "training.global_batch_size": 4}


def test_a_schedule_from_a_file_agrees(tmp_path: Path) -> None:
    path = write(tmp_path / "1f1b.csv", table(2, 4))
    mapping = {"parallelism.tp": 2, "parallelism.experts.ep": 2, "pipeline.schedule_csv": path}
    parity.check(4, STEP | mapping, steps=1)


def test_idle_cells_and_messages_in_a_file_change_no_table(tmp_path: Path) -> None:
    rows = [["", "0UNSHARD", *row, "0RESHARD"] for row in table(2, 4)]
    tables = []
    for name, cells in {"with": rows, "without": table(2, 4)}.items():
        stage: Any = SimpleNamespace(num_stages=2, group_size=2, group_rank=0, is_last=False, has_backward=True)
        options = Pipeline(schedule_csv=write(tmp_path / f"{name}.csv", cells))
        kwargs = dict(microbatches=4, loss=int, keep_gathered=False, with_vocabulary=False)
        tables.append(make_schedule([stage], options, **kwargs)[0].pipeline_order_with_comms)
    assert tables[0] == tables[1] and "0SEND_F3" in map(str, tables[0][0])


def forward_alone(changes: dict[str, Any]) -> tuple[float, float, dict[str, torch.Tensor], float]:
    """The loss without backward, then that of a training step with its gradients; and the schedule's bubble."""
    from titanmoe.comm.collectives import all_reduce

    trainer = parity.make_trainer(changes, loader=parity.samples())
    batches = trainer.training.loader.next_step()
    totals = trainer.training.slicer.count(batches)
    for moe in trainer.training.moe_layers.values():
        moe.begin_step(1, totals.tokens, trainer.training.loader.global_batch_size)
    slices = trainer.training.slicer.slices(batches)
    gradients, losses = trainer.training.gradients, []

    def per_label(output_NBS: torch.Tensor, batch_slice: Any) -> torch.Tensor:
        return gradients.objective(output_NBS, batch_slice) / totals.divisor

    for _ in range(2):
        losses.append(gradients.engine.run(slices, per_label, backward=False))
        assert not losses[-1].requires_grad
        assert all(p.grad is None for p in trainer.training.parameters.values()), "a gradient without backward"
    alone, again = (
        all_reduce(loss, trainer.training.meshes.world) / trainer.training.meshes.tp.size for loss in losses
    )
    assert torch.equal(alone, again)
    local = trainer.training.gradients.forward_backward(slices, totals, None)
    training = all_reduce(local.loss, trainer.training.meshes.world) / trainer.training.meshes.tp.size
    trainer.training.gradients.finish_gradients()
    grads = parity.whole(
        {name: p.grad for name, p in trainer.training.parameters.items()}, dist.get_rank(), trainer.training.fold
    )
    return alone.item(), training.item(), grads, trainer.training.gradients.engine.bubble


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
    assert parity.worst_error(grads, want.grads)[0] <= parity.TOLERANCE["float64"]
    # 2 ranks, 4 microbatches: (p - 1) / (v * m + p - 1) with v stages per rank
    known = {"no_pipeline": 0, "GPipe": 1 / 5, "1F1B": 1 / 5, "Interleaved1F1B": 1 / 9}
    if schedule in known:
        assert idle == pytest.approx(known[schedule])
    else:
        assert idle < 1 / 9


def sent_in(changes: dict[str, Any], many: bool) -> tuple[Any, dict[str, set[tuple[str, int]]]]:
    """A step's report and weights after it, and by group what this rank does in it, and with whom. many: as on GPUs."""
    seen: dict[str, set[tuple[str, int]]] = {}
    regrouped = Stage._regrouped

    def noted(stage: Stage, ops: list[Any]) -> list[Any]:
        for op in regrouped(stage, ops):
            seen.setdefault(op.group.group_name, set()).add((op.op.__name__, op.group_peer))
        return ops

    usual = mock.patch.object(pipeline_stage, "choose", lambda _, usual, cpu: usual) if many else nullcontext()
    with mock.patch.object(Stage, "_regrouped", noted), usual:
        trainer = parity.make_trainer(changes, loader=parity.samples())
        report = trainer.train_step()
    weights = {name: to_local(p).detach().clone() for name, p in trainer.training.parameters.items()}
    return (report, weights), seen


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_as_on_gpus_a_group_has_messages_to_one_rank_or_from_one(schedule: str) -> None:
    changes = {"parallelism.pp": 4, "pipeline.schedule": schedule, "model.num_layers": 8}
    changes |= {"training.global_batch_size": 8}
    many, one = (world.run(4, sent_in, changes, groups) for groups in (True, False))
    for rank, ((report, weights), seen) in enumerate(many):
        at_end = schedule != "Interleaved1F1B" and rank in (0, 3)
        assert [len(ways) for ways in seen.values()] == [1] * (2 if at_end else 4)
        (alone_report, alone_weights), alone_seen = one[rank]
        assert len(alone_seen) == 1 and report == alone_report
        assert all(torch.equal(weight, alone_weights[name]) for name, weight in weights.items())


class _Gate(torch.autograd.Function):
    """Two products of the same input, in one node with two outputs."""

    @staticmethod
    def forward(ctx, x, gate, up):
        ctx.save_for_backward(x, gate, up)
        return x @ gate, x @ up

    @staticmethod
    def backward(ctx, of_gate, of_up):
        x, gate, up = ctx.saved_tensors
        return of_gate @ gate.t() + of_up @ up.t(), x.t() @ of_gate, x.t() @ of_up


def test_the_second_part_of_a_backward_keeps_a_nodes_outputs_apart() -> None:
    """With a weight before the node and one behind it, for which the node is not where the first part stopped."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(5))

    def stage() -> torch.Tensor:
        before, gate, up, behind = (weight.view_as(weight) for weight in weights)
        a, b = _Gate.apply(x @ before, gate, up)
        return (a.sigmoid() * b) @ behind

    want = torch.autograd.grad(stage(), weights, torch.ones(3, 3, dtype=torch.float64))
    y = stage()
    alive = torch.autograd.graph.get_gradient_edge(y)
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(weights))
    complete = []
    add_weight_gradients(weights, groups, complete.append)
    assert {id(weight) for weight in complete} == {id(weight) for weight in weights}
    for weight, grad in zip(weights, want, strict=True):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-12, atol=1e-12)
    assert alive is not None and not any("intermediates" in group for group in groups)


def test_a_stage_is_gathered_once_a_step_however_many_a_rank_has() -> None:
    """torch's table keeps three stages of a rank gathered, and would gather these four again and again."""
    changes = {"parallelism.pp": 2, "pipeline.schedule": "Interleaved1F1B", "pipeline.virtual_stages": 4}
    changes |= {"model.num_layers": 8, "training.global_batch_size": 8}
    found = rehearse(config_of(changes, 4, "h100"), 4, 0, "h100")
    gathers = [m for m in found.log.messages if found.groups[m.group].kind == "shards" and m.op == "all-gather"]
    assert len(gathers) == 2 * 4 + 1  # blocks and experts of four layers, and the embedding


@pytest.mark.parametrize("microbatches", [4, 32])
def test_only_sizing_leaves_a_row(microbatches: int) -> None:
    """Of pp 4 with 7 stages a rank."""
    shape: Any = SimpleNamespace(
        n_local_stages=7, microbatches_per_round=4, pp_group_size=4, _n_microbatches=microbatches
    )
    computed = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(shape, 0)
    row = schedules._add_unshard_reshard(computed)
    once = gather_each_stage_once(row)

    def of(actions: list, kind: Any) -> list[int]:
        return [action.stage_index for action in actions if action.computation_type == kind]

    stages = set(of(row, schedules.FORWARD))
    assert len(of(row, schedules.UNSHARD)) == (71 if microbatches == 32 else 11)
    assert sorted(of(once, schedules.UNSHARD)) == sorted(of(once, schedules.RESHARD)) == sorted(stages)
    sizing = (schedules.UNSHARD, schedules.RESHARD)
    left, before = ([a for a in actions if a.computation_type not in sizing] for actions in (once, row))
    assert left == before
    for stage in stages:
        steps = [(i, a.computation_type) for i, a in enumerate(once) if a.stage_index == stage]
        assert steps[0][1] == schedules.UNSHARD and steps[-1][1] == schedules.RESHARD
