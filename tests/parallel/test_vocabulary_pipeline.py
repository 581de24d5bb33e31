"""Embedding and head over all stages of a pipeline: the same numbers, passes at the same places of every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests import parity, world
from tests.parallel.test_pipeline import forward_alone
from tests.support.families import has_attention_only
from titanmoe.comm.collectives import to_local
from titanmoe.fold.legality import violations
from titanmoe.fold.pipeline_schedules import Action, Cell, inputs_of, is_pass, result_of, single_order
from titanmoe.fold.vocabulary_passes import EARLIER_FORWARDS, SCHEDULES, insert_passes, with_earlier_forwards
from titanmoe.models.families import names
from titanmoe.plan.schedule_cost import schedule_rows
from titanmoe.tokens import IGNORE

SHARED = {"parallelism.pp": 2, "parallelism.vocab": "pipeline"}
ODD, TIED = {"model.vocab_size": 49}, {"model.tie_embeddings": True}
MTP = {"model.mtp_depth": 1, "training.mtp_weight": 0.7}
EIGHT = {"training.global_batch_size": 8}

# ---- passes in a schedule's table


ORDERS = [
    ("GPipe", 2, 1, 3),
    ("1F1B", 4, 1, 9),
    ("1F1B", 2, 1, 2),
    ("1F1B", 16, 1, 20),
    ("Interleaved1F1B", 4, 2, 8),
    ("Interleaved1F1B", 2, 3, 6),
]


def plain_rows(schedule: str, pp: int, virtual: int, microbatches: int) -> list[list[Cell]]:
    return [[cell for cell in row if cell] for row in schedule_rows(schedule, pp, virtual, microbatches)]


@pytest.mark.parametrize(("schedule", "pp", "virtual", "microbatches"), ORDERS)
def test_each_rank_has_all_passes_in_the_same_order(schedule: str, pp: int, virtual: int, microbatches: int) -> None:
    stages, plain = pp * virtual, plain_rows(schedule, pp, virtual, microbatches)
    rows = insert_passes(plain, stages)
    assert [[cell for cell in row if not is_pass(cell)] for row in rows] == list(map(with_earlier_forwards, plain))
    passes = [[str(action) for (action,) in row if is_pass((action,))] for row in rows]
    assert passes == [passes[0]] * pp
    owners = {"E": 0, "D": 0} | dict.fromkeys("HSLT", stages - 1)
    assert sorted(passes[0]) == sorted(f"{owners[does]}{does}{m}" for m in range(microbatches) for does in owners)
    for rank, stage, order in (0, 0, "EFBD"), (pp - 1, stages - 1, "EFHSLTBD"):
        place = {str(action): i for i, (action,) in enumerate(rows[rank])}
        for m in range(microbatches):
            steps = [place[f"{owners.get(does, stage)}{does}{m}"] for does in order]
            assert steps == sorted(steps)
    for row in rows:  # as the planner has it: logits of one microbatch at a time
        assert [action.does for (action,) in row if action.does in "ST"] == ["S", "T"] * microbatches


@pytest.mark.parametrize(("schedule", "pp", "virtual", "microbatches"), ORDERS)
def test_nothing_deadlocks_if_all_ranks_meet_in_each_pass(
    schedule: str, pp: int, virtual: int, microbatches: int
) -> None:
    stages, finished = pp * virtual, set()
    queues = insert_passes(plain_rows(schedule, pp, virtual, microbatches), stages)

    def is_ready(cell: Cell) -> bool:
        return finished.issuperset(inputs_of(cell[0], stages, shared=True))

    while any(queues):
        left = sum(map(len, queues))
        for queue in queues:
            while queue and not is_pass(queue[0]) and is_ready(queue[0]):
                finished.add(result_of(queue.pop(0)[0]))
        if all(queue and is_pass(queue[0]) for queue in queues):
            (cell,) = {queue.pop(0) for queue in queues}
            assert is_ready(cell)
            finished.add(result_of(cell[0]))
        assert sum(map(len, queues)) < left


def test_1f1b_runs_two_more_forwards_before_its_first_backward() -> None:
    plain = single_order("1F1B", 4, 9)
    for row, longer in zip(plain, map(with_earlier_forwards, plain), strict=True):
        first = row.index((Action(row[0][0].stage, "B", 0),))
        assert [cell[0].does for cell in longer].index("B") == first + EARLIER_FORWARDS
        assert sorted(longer) == sorted(row)


def test_1f1b_embeds_no_microbatch_before_it_is_needed() -> None:
    (first, *_) = insert_passes(single_order("1F1B", 2, 9), 2)
    order = [str(action) for (action,) in first]
    assert order[:4] == ["0E0", "0E1", "0F0", "0E2"]
    for m in range(2, 9):  # while the first rank runs what is before the forward
        forward = order.index(f"0F{m}")
        between = [one for one in order[order.index(f"0E{m}") : forward] if one[1] in "FB"]
        assert len(between) == 1


# ---- parity

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "GPipe": (2, {"pipeline.schedule": "GPipe"}),
    "1F1B": (2, {}),
    "Interleaved1F1B": (2, {"pipeline.schedule": "Interleaved1F1B", "model.num_layers": 4}),
    "odd vocabulary with tp": (4, ODD | {"parallelism.tp": 2}),
    "tied, GPipe": (4, ODD | TIED | {"parallelism.tp": 2, "pipeline.schedule": "GPipe"}),
    "replicas, context parallel": (8, ODD | EIGHT | {"parallelism.dp_replicate": 2, "parallelism.cp": 2}),
    "interleaved, tied": (
        8,
        {"parallelism.pp": 4, "parallelism.tp": 2, "model.num_layers": 8, "pipeline.schedule": "Interleaved1F1B"}
        | {"model.vocab_size": 51}
        | TIED
        | EIGHT,
    ),
    "eight stages": (8, {"model.vocab_size": 51, "parallelism.pp": 8, "model.num_layers": 8} | EIGHT),
    "adapters": (4, ODD | {"parallelism.tp": 2, "lora.rank": 2}),
    "frozen embedding": (2, ODD | {"training.freeze": ["embed.*"]}),
    "frozen head": (2, ODD | {"training.freeze": ["head.weight"]}),
    "Muon": (4, ODD | TIED | {"parallelism.tp": 2, "optimizer.name": "muon"}),
    "float32, slices": (2, ODD | dict.fromkeys(parity.NUMERICS, "float32") | {"training.loss_chunks": 2}),
    "compiled": (2, ODD | {"compile.enable": True, "compile.backend": "aot_eager"}),
    "multi-token prediction": (2, ODD | MTP),
    "multi-token prediction after the norm, tied, tp, GPipe": (
        4,
        ODD | TIED | MTP | {"model.mtp_after_norm": True, "parallelism.tp": 2, "pipeline.schedule": "GPipe"},
    ),
    "multi-token prediction, interleaved, cp, tied, slices, recomputed": (
        4,
        {"parallelism.cp": 2}
        | {"pipeline.schedule": "Interleaved1F1B", "model.num_layers": 4, "activation_checkpoint.mode": "full"}
        | TIED
        | MTP
        | EIGHT
        | {"training.loss_chunks": 3},
    ),
    "multi-token prediction, four stages, tp": (
        8,
        {"model.vocab_size": 51, "parallelism.pp": 4, "parallelism.tp": 2, "model.num_layers": 4} | MTP,
    ),
    "multi-token prediction, frozen embedding": (2, ODD | MTP | {"training.freeze": ["embed.*"]}),
    "multi-token prediction, adapters": (4, ODD | MTP | {"parallelism.tp": 2, "lora.rank": 2}),
    "multi-token prediction after the norm, compiled": (
        2,
        ODD | MTP | {"model.mtp_after_norm": True, "compile.enable": True, "compile.backend": "aot_eager"},
    ),
    "tied, four stages, slices": (4, TIED | {"parallelism.pp": 4, "model.num_layers": 4, "training.loss_chunks": 3}),
}


SLOW = ("eight stages", "interleaved, tied", "frozen head", "compiled")
SLOW += tuple(case for case in CASES if case.startswith("multi-token prediction") and not case.endswith("tp, GPipe"))


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_agrees_with_the_plain_model(case: str) -> None:
    size, changes = CASES[case]
    parity.check(size, SHARED | changes)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [name for name in names() if has_attention_only(name)])
def test_every_family_agrees(family: str, tied: bool) -> None:
    own = parity.preset_of(family)
    shape = [key for key in parity.TINY if key.startswith("model.") and not key.endswith(("num_layers", "init_std"))]
    changes = {key: own[key.removeprefix("model.")] for key in shape}
    changes |= {"model.num_layers": 2, "model.tie_embeddings": tied, "parallelism.tp": 2}
    parity.check(4, SHARED | changes, steps=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_alone_gives_the_loss_and_leaves_no_trace(schedule: str) -> None:
    changes = SHARED | ODD | MTP | EIGHT | {"pipeline.schedule": schedule, "model.num_layers": 4}
    alone, training, grads, _ = world.run(4, forward_alone, changes)[0]
    want = parity.expected(changes, 4).steps[0]
    assert alone == training == pytest.approx(want.loss, rel=1e-12)
    assert parity.worst_error(grads, want.grads)[0] <= parity.TOLERANCE["float64"]


def with_few_labels(changes: dict[str, Any]) -> dict[str, Any]:
    """A step in which one microbatch has no label and another a single one."""
    trainer = parity.make_trainer(changes, loader=parity.samples())
    loader, (batches,) = trainer.training.loader, [trainer.training.loader.peek()]
    for m, kept in (0, 0), (1, 1):
        labels_BS = batches[m].labels_BS
        at = (labels_BS != IGNORE).nonzero()[kept:]
        labels_BS[at[:, 0], at[:, 1]] = IGNORE
    loader.next_step = lambda: batches
    report = trainer.train_step()
    return {name: report[name] for name in ("loss", "mtp_loss", "grad_norm", "count") if name in report}


def test_a_microbatch_may_have_one_label_or_none() -> None:
    got, *_ = world.run(2, with_few_labels, SHARED | ODD | MTP)
    want, *_ = world.run(2, with_few_labels, SHARED | ODD | MTP | {"parallelism.vocab": "tensor"})
    assert got == pytest.approx(want, rel=1e-12)


def after_steps(changes: dict[str, Any], cold: bool) -> list[Any]:
    """Reports and weights after two steps; cold: as on GPUs, with all kernels loaded before the first message."""
    trainer = parity.make_trainer(changes, loader=parity.samples())
    trainer.training.gradients.engine.cold = cold
    reports = [trainer.train_step() for _ in range(2)]
    return [reports, *(to_local(p).detach().clone() for p in trainer.training.parameters.values())]


def test_loading_kernels_first_leaves_no_trace() -> None:
    cold, warm = (world.run(2, after_steps, SHARED | ODD | TIED | MTP, cold) for cold in (True, False))
    for (reports, *weights), (other_reports, *others) in zip(cold, warm, strict=True):
        assert reports == other_reports and all(map(torch.equal, weights, others))


# ---- laws


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"parallelism.pp": 1}, "parallelism.pp = 1"),
        ({"pipeline.schedule": "DualPipeV", "model.num_layers": 8}, "schedule = DualPipeV"),
        ({"model.vocab_size": 9, "parallelism.tp": 4}, "the last would have none"),
        ({"model.vocab_size": 25, "parallelism.dp_shard": 4}, "over dp_shard * cp = 4 ranks: pad the vocabulary to 26"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], what: str) -> None:
    config = copy.deepcopy(parity.read({}, 1))
    for path, value in (SHARED | changes).items():
        table, name = path.split(".")
        setattr(getattr(config, table), name, value)
    found = [one for one in violations(config, 8) if "parallelism.vocab" in one]
    assert len(found) == 1 and what in found[0] and "use" in found[0]
