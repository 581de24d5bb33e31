"""The mapping of a run that is restarted on another number of ranks."""

import pytest

from titanmoe.config.schema import Parallelism
from titanmoe.fold.degrees import FoldError, derive, with_degrees
from titanmoe.fold.legal_mappings import refit


def parallelism_of(**degrees: int) -> Parallelism:
    return with_degrees(Parallelism(), degrees)


@pytest.mark.parametrize(
    ("recipe", "world", "now", "change"),
    [
        # what is derived or fits anyway does not change
        (dict(tp=2, ep=2), 4, dict(dp_shard=2, edp=2), ""),
        (dict(dp_shard=2, edp=2), 2, dict(dp_shard=2, edp=2), ""),
        # dp_shard first, and edp with it
        (dict(dp_shard=2, edp=2), 1, dict(dp_shard=1, edp=1), "dp_shard 2 -> 1, parallelism.experts.edp 2 -> 1"),
        (dict(dp_shard=4, tp=2, ep=2), 4, dict(dp_shard=2, edp=2), "dp_shard 4 -> 2"),
        (dict(dp_replicate=2, dp_shard=4), 4, dict(dp_replicate=2, dp_shard=2), "dp_shard 4 -> 2"),
        (dict(dp_shard=2), 8, dict(dp_shard=8), "dp_shard 2 -> 8"),
        # then dp_replicate, to the greatest common divisor with the ranks there are
        (dict(dp_replicate=2), 1, dict(dp_replicate=1, dp_shard=1), "dp_replicate 2 -> 1"),
        (dict(dp_replicate=4, dp_shard=2), 6, dict(dp_replicate=2, dp_shard=3), "dp_replicate 4 -> 2"),
        (dict(dp_replicate=4, dp_shard=2, ep=2), 6, dict(edp_replicate=1, edp=3), "dp_shard 2 -> 3"),
        # experts by themselves
        (dict(edp_replicate=4, ep=2), 4, dict(edp_replicate=2, edp=1), "edp_replicate 4 -> 2"),
        (dict(edp_replicate=4), 6, dict(edp_replicate=2, edp=3), "edp_replicate 4 -> 2"),
        (dict(edp=4, edp_replicate=2), 4, dict(edp_replicate=2, edp=2), "edp 4 -> 2"),
        (dict(edp=4, dp_replicate=2), 2, dict(dp_replicate=2, edp_replicate=2, edp=1), "edp 4 -> 1"),
        # with a pipeline
        (dict(pp=2, dp_shard=4, edp=4), 4, dict(dp_shard=2, edp=2), "dp_shard 4 -> 2"),
    ],
)
def test_only_data_parallel_changes(recipe, world, now, change):
    fitted, line = refit(world, parallelism_of(**recipe))
    fold = derive(world, fitted)
    assert {name: getattr(fold, name) for name in now} == now
    for name in ("pp", "cp", "tp", "ep", "etp"):
        assert getattr(fold, name) == recipe.get(name, 1), "only data parallel changes"
    assert change in line and bool(line) == bool(change)
    assert not line or ("restarted on" in line and line.endswith("the global batch stays"))


@pytest.mark.parametrize(
    ("recipe", "world", "unit", "fixed"),
    [
        (dict(dp_shard=2, tp=2), 3, 2, "parallelism.tp = 2 needs"),
        (dict(dp_shard=1, tp=2, ep=4), 2, 4, "parallelism.tp = 2, parallelism.experts.ep = 4 needs"),
        (dict(pp=2, tp=2, ep=3, dp_shard=3, edp=2), 8, 12, "pp = 2, parallelism.tp = 2, parallelism.experts.ep = 3"),
        (dict(cp=4, etp=8), 4, 8, "parallelism.cp = 4, parallelism.experts.etp = 8"),
    ],
)
def test_if_no_mapping_is_legal_the_reason_is_given(recipe, world, unit, fixed):
    with pytest.raises(FoldError) as refused:
        refit(world, parallelism_of(**recipe))
    (problem,) = refused.value.problems
    assert f"restarted on {world} ranks, where" in problem and fixed in problem
    assert f"a multiple of {unit} ranks ({world} % {unit} = {world % unit})" in problem
    derive(unit, refit(unit, parallelism_of(**recipe))[0])  # and what it asks for is enough


def test_a_world_that_grows_again_is_as_the_recipe_says():
    recipe = parallelism_of(dp_replicate=2, dp_shard=2, edp=2)
    assert refit(2, recipe)[0] != recipe
    assert refit(4, recipe) == (recipe, "")


@pytest.mark.parametrize("degrees", [dict(tp=0), dict(dp_shard=-2), dict(ep=-1)])
def test_impossible_degrees_are_left_to_the_laws(degrees):
    assert refit(4, parallelism_of(**degrees)) == (parallelism_of(**degrees), "")
