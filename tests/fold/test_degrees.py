"""Degrees: what is derived, and every reason why degrees do not fit."""

from __future__ import annotations

import pytest

from titanmoe.config.schema import Experts, Parallelism
from titanmoe.fold.degrees import Fold, FoldError, derive


def parallelism_of(**degrees: int) -> Parallelism:
    names = ("ep", "etp", "edp", "edp_replicate")
    experts = Experts(**{name: n for name, n in degrees.items() if name in names})
    return Parallelism(**{name: n for name, n in degrees.items() if name not in names}, experts=experts)


def problems(world: int, **degrees: int) -> list[str]:
    with pytest.raises(FoldError) as error:
        derive(world, parallelism_of(**degrees))
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def test_derives_both_views():
    fold = derive(16, parallelism_of(pp=2, tp=2, cp=2, ep=4))
    assert fold == Fold(
        world=16, pp=2, dp_replicate=1, dp_shard=2, cp=2, tp=2, edp_replicate=1, edp=2, ep=4, etp=1
    )  # fmt: skip
    assert (fold.stage, fold.dp) == (8, 2)
    assert list(fold.attention_axes.items()) == [("pp", 2), ("dp_replicate", 1), ("dp_shard", 2), ("cp", 2), ("tp", 2)]
    assert list(fold.expert_axes.items()) == [("pp", 2), ("edp_replicate", 1), ("edp", 2), ("ep", 4), ("etp", 1)]


@pytest.mark.parametrize(
    ("world", "degrees", "edp_replicate", "edp"),
    [
        (8, dict(dp_replicate=2, tp=2, ep=2), 2, 2),
        (8, dict(dp_replicate=4, ep=4), 2, 1),
        (8, dict(dp_replicate=8, ep=8), 1, 1),
        (12, dict(dp_replicate=3, ep=2), 3, 2),
        (24, dict(dp_replicate=4, ep=2, etp=2), 2, 3),
        (8, dict(dp_replicate=4, edp_replicate=1, ep=2), 1, 4),
        (8, dict(edp_replicate=4, ep=2), 4, 1),
    ],
)
def test_experts_are_replicated_like_attention_where_possible(world, degrees, edp_replicate, edp):
    fold = derive(world, parallelism_of(**degrees))
    assert (fold.edp_replicate, fold.edp) == (edp_replicate, edp)


def test_given_derived_degrees_are_checked():
    assert derive(8, parallelism_of(dp_shard=4, tp=2, edp=2, ep=4)).dp_shard == 4
    assert problems(8, dp_shard=3, tp=2, edp=5, ep=4) == [
        "parallelism.dp_shard = 3 is not what dp_replicate 1 * cp 1 * tp 2 leaves of the stage of 8 ranks "
        "(world 8 / pp 1): use 4, or -1 to derive it",
        "parallelism.experts.edp = 5 is not what edp_replicate 1 * ep 4 * etp 1 leaves of the stage of 8 ranks "
        "(world 8 / pp 1): use 2, or -1 to derive it",
    ]


def test_an_indivisible_stage_of_either_view():
    assert problems(16, tp=3, ep=3) == [
        "parallelism.tp = 3 does not divide the stage of 16 ranks (world 16 / pp 1), 16 % 3 = 1: "
        "use tp in 1, 2, 4, 8, 16",
        "parallelism.experts.ep = 3 does not divide the stage of 16 ranks (world 16 / pp 1), 16 % 3 = 1: "
        "use ep in 1, 2, 4, 8, 16",
    ]


def test_a_product_names_each_degree_that_fixes_it_alone():
    (problem,) = problems(16, pp=2, cp=2, tp=3)
    assert problem == (
        "parallelism.cp * parallelism.tp = 2 * 3 = 6 does not divide the stage of 8 ranks (world 16 / pp 2), "
        "8 % 6 = 2: use tp in 1, 2, 4"
    )
    (problem,) = problems(16, ep=3, etp=3)
    assert problem.endswith("16 % 9 = 7: use a product in 1, 2, 4, 8, 16")
    (problem,) = problems(8, edp_replicate=8, ep=2)
    assert "8 % 16 = 8: use edp_replicate in 1, 2, 4 or ep = 1" in problem


def test_pp_that_does_not_divide_the_world():
    assert problems(16, pp=3) == [
        "parallelism.pp = 3 does not divide the world of 16 ranks (16 % 3 = 1): use pp in 1, 2, 4, 8, 16"
    ]


def test_an_impossible_count_is_a_problem_and_hides_no_other():
    reasons = problems(16, pp=2, dp_replicate=0, dp_shard=-2, cp=-1, tp=3, ep=0, etp=3, edp=0, edp_replicate=-5)
    assert [problem.split(" ")[0] for problem in reasons] == [
        "parallelism.dp_replicate",
        "parallelism.dp_shard",
        "parallelism.cp",
        "parallelism.experts.edp_replicate",
        "parallelism.experts.edp",
        "parallelism.experts.ep",
        "parallelism.tp",
        "parallelism.experts.etp",
    ]
    assert reasons[0] == "parallelism.dp_replicate = 0 is not a number of ranks: use 1 or more"
    assert reasons[1] == "parallelism.dp_shard = -2 is not a number of ranks: use 1 or more, or -1 to derive it"
    assert "tp = 3 does not divide the stage of 8 ranks" in reasons[6]


@pytest.mark.parametrize("world", [0, -4])
def test_an_empty_world(world):
    assert problems(world, pp=0) == [
        "parallelism.pp = 0 is not a number of ranks: use 1 or more",
        f"the world has {world} ranks: use 1 or more",
    ]
