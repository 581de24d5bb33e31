"""All ranks' messages complete, for any recipe and any routing; and faults in the program are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from tests.parity import arguments
from tests.rehearse.small import config_of
from tests.support import nondeterministic
from tests.support.case_features import DISPATCHERS, RECOMPUTE, SCHEDULES
from tests.test_recipes import RECIPES
from tests.test_recipes import world as ranks
from titanmoe.config.schema import Config
from titanmoe.moe.dispatchers.alltoall import AllToAllExchange
from titanmoe.ops.kernels import installed
from titanmoe.parallel.pipeline import Pipeline, stage_ranks
from titanmoe.rehearse.many_ranks import build_programs, check_ranks, rehearse_ranks
from titanmoe.rehearse.message_order import HOST_ORDER, Verdict, check_order
from titanmoe.rehearse.rehearsal import recipe_to_rehearse, rehearse

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
NARROW = {"training.mixed_precision_param": "bfloat16", "moe.kernels": "auto", "moe.force_balance": False}
STAGES = NARROW | {"model.num_layers": 4, "parallelism.pp": 2, "parallelism.experts.ep": 2}
STAGES |= {"training.global_batch_size": 8}
ONE = NARROW | {"model.num_layers": 1, "training.global_batch_size": 4, "parallelism.experts.ep": 4}


def of_stages(changes: dict[str, Any], world: int = 4) -> Verdict:
    return check_ranks(rehearse_ranks(config_of(STAGES | changes, world, "h100"), world, "h100"))


def of_all(changes: dict[str, Any], imbalance: float = 1.0, world: int = 4) -> Verdict:
    config = config_of(ONE | changes, world, "h100")
    return check_order(
        build_programs([rehearse(config, world, rank, "h100", routing=imbalance, node=2) for rank in range(world)])
    )


def schedule(name: str) -> dict[str, Any]:
    return SCHEDULES[name] | ({"moe.overlap": "pairs"} if name == "DualPipeV" else {})


@pytest.mark.parametrize(
    "name", [pytest.param(s, marks=() if s == "DualPipeV" else pytest.mark.slow) for s in SCHEDULES]
)
def test_schedules(name: str) -> None:
    assert of_stages(schedule(name)).text == HOST_ORDER


@pytest.mark.parametrize(
    ("schedule", "tp", "depth"),
    [
        ("1F1B", 1, 1),
        pytest.param("GPipe", 2, 1, marks=pytest.mark.slow),
        pytest.param("1F1B", 2, 0, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_a_vocabulary_over_the_pipeline(schedule: str, tp: int, depth: int) -> None:
    """In steps of two data ranks; those of tp are compared with real ranks' in test_reality.py."""
    changes = {"parallelism.vocab": "pipeline", "pipeline.schedule": schedule, "parallelism.tp": tp}
    changes |= {"model.mtp_depth": depth}
    assert of_stages(changes, 4 * tp).text == HOST_ORDER


@pytest.mark.parametrize("imbalance", [pytest.param(1.0, marks=pytest.mark.slow), 1.7, 4.0])
def test_every_rank_of_an_all_to_all(imbalance: float) -> None:
    """At 4 times the mean, two of the four ranks have no token."""
    assert of_all({}, imbalance).text == HOST_ORDER


def test_two_halves_of_a_microbatch() -> None:
    halves = {"moe.overlap": "halves", "training.local_batch_size": 2, "training.global_batch_size": 8}
    assert of_all(halves | {"activation_checkpoint.mode": "moe"}, 1.7).text == HOST_ORDER


@pytest.mark.parametrize("name", [d for d in DISPATCHERS if d != "alltoall"])
def test_dispatchers(name: str) -> None:
    assert of_all(DISPATCHERS[name] | {"parallelism.node": 4 if name == "symm_mem" else 2}, 1.7).text == HOST_ORDER


@pytest.mark.parametrize(
    "kind", ["ring", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ulysses", "allgather"))]
)
def test_context(kind: str) -> None:
    changes = {"parallelism.cp": 2, "parallelism.cp_kind": kind, "parallelism.experts.ep": 2}
    assert of_all(changes).text == HOST_ORDER


@pytest.mark.slow
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_recomputation(mode: str) -> None:
    assert of_all(RECOMPUTE[mode] | {"parallelism.tp": 2}, 1.7).text == HOST_ORDER


def shortened(recipe: Path, most: int, microbatches: int) -> tuple[Config, int]:
    """With at most so many pipeline ranks, and stages of each; as few layers as they and dense layers allow, and so
    many microbatches per pipeline rank. Also how many ranks that is.
    """
    world, argv = ranks(recipe), ["--config", str(recipe)]
    config = recipe_to_rehearse(argv, world, "h100")
    fold, pp = config.parallelism, min(config.parallelism.pp, most)
    world = world // fold.pp * pp
    stages = len(stage_ranks(config.pipeline, fold.pp)) // fold.pp if pp > 1 else 1
    changes = {
        "training.global_batch_size": (
            fold.dp_replicate * fold.dp_shard * config.training.local_batch_size * (microbatches * pp if pp > 1 else 1)
        ),
        "parallelism.pp": pp,
        "model.num_layers": max(pp * min(stages, most), config.model.num_dense_layers + 1),
    }
    if stages > most:
        changes["pipeline.virtual_stages"] = most
    return recipe_to_rehearse([*argv, *arguments(changes)], world, "h100"), world


PLANNED = [recipe for recipe in RECIPES if recipe.stem not in ("sft_debug", "dpo_debug")]
"""The model of those is made where they run (scripts/make_small_model.py)."""


@pytest.mark.parametrize("recipe", PLANNED, ids=lambda recipe: recipe.stem)
def test_recipes(recipe: Path) -> None:
    """The first rank of each stage, also without an operation that torch refuses if it has to be deterministic. Those
    for GPUs with a microbatch per pipeline rank; on their schedules, debug_pp, debug_5d and DualPipeV have two.
    """
    two = "debug" in recipe.stem or "DualPipeV" in recipe.read_text()
    config, world = shortened(recipe, most=2, microbatches=1 + two)
    firsts = range(0, world, world // config.parallelism.pp)
    with nondeterministic.record_refused() as refused:
        assert check_ranks(rehearse_ranks(config, world, "h100", ranks=firsts)).text == HOST_ORDER
    assert not refused, "`training.deterministic` would end this run on GPUs"


CORNERS = [recipe for recipe in PLANNED if recipe.stem != "qwen2_57b_a14b"]
"""Recipes whose corners are rehearsed. The data ranks of qwen2_57b_a14b's stages differ: they reduce 71,680 and 14,336
bytes over tp, as the verdict says."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CORNERS, ids=lambda recipe: recipe.stem)
def test_recipes_at_their_corners(recipe: Path) -> None:
    """Rehearse all ranks of debug recipes, and the corners of others with at most four pipeline ranks (time)."""
    config, world = shortened(recipe, most=4, microbatches=2)
    assert check_ranks(rehearse_ranks(config, world, "h100")).text == HOST_ORDER


def test_shards_of_one_rank_are_not_those_of_the_rank_before() -> None:
    """A gate of one row is on the first data rank alone."""
    config = config_of(ONE | {"model.shared_hidden": 16, "model.shared_gate": True}, 4, "h100")
    first, last = (rehearse(config, 4, rank, "h100").parameter_bytes for rank in (0, 3))
    assert first - last >= 4 * config.model.dim


# ---- faults


def faulty(world: int, of: Callable[[int], Any], changes: dict[str, Any]) -> Verdict:
    """of: the fault on each rank."""
    config, rehearsals = config_of(ONE | changes, world, "h100"), []
    for rank in range(world):
        with of(rank):
            rehearsals.append(rehearse(config, world, rank, "h100"))
    return check_order(build_programs(rehearsals))


def test_a_rank_that_skips_its_call_is_named() -> None:
    """As if it first checked whether it has a token."""
    real = AllToAllExchange.start_combine

    def alone(self: AllToAllExchange, y_RD: Tensor) -> Any:
        return real(self._replace(x_RD=self.x_RD._replace(transfer=None)), y_RD)

    def of(rank: int) -> Any:
        return mock.patch.object(AllToAllExchange, "start_combine", alone if rank == 2 else real)

    verdict = faulty(4, of, {})
    assert not verdict.safe and "rank 2" in verdict.text and "moe/dispatchers/alltoall.py" in verdict.text


def test_an_extra_microbatch_is_found() -> None:
    real = Pipeline.run
    config = config_of(STAGES | {"training.global_batch_size": 4}, 4, "h100")

    def run(self: Pipeline, slices: list, *rest: Any) -> Any:
        real(self, slices, *rest)
        return real(self, slices, *rest)

    first = rehearse(config, 4, 0, "h100")
    with mock.patch.object(Pipeline, "run", run):
        second = rehearse(config, 4, 2, "h100")
    verdict = check_ranks([first, second])
    assert not verdict.safe and "rank 2" in verdict.text and "stages pp" in verdict.text
