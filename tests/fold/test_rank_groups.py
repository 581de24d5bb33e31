"""Rank groups: the reference groups, and what is true of the groups of every mapping."""

from __future__ import annotations

import sys
from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanmoe.config.schema import Experts, Parallelism
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.rank_groups import axes_of, coordinates, crossing, group_of, groups

VIEWS = {
    "attention": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "experts": ("pp", "edp_replicate", "edp", "ep", "etp"),
}
COMBINATIONS = [
    (view, axes) for view, names in VIEWS.items() for n in range(1, 6) for axes in combinations(names, n)
]  # fmt: skip


@st.composite
def folds(draw: st.DrawFn) -> Fold:
    """Two ways to split the same stage."""
    attention = [draw(st.integers(1, n)) for n in (2, 4, 2, 4)]
    stage, experts = prod(attention), []
    left = stage
    for _ in range(3):
        experts.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= experts[-1]
    pp = draw(st.integers(1, 3))
    names = ("dp_replicate", "dp_shard", "cp", "tp", "edp_replicate", "edp", "ep", "etp")
    return Fold(world=pp * stage, pp=pp, **dict(zip(names, [*attention, *experts, left], strict=True)))


def text(ranks_of_groups: list[tuple[int, ...]]) -> str:
    return "|".join("".join(map(str, group)) for group in ranks_of_groups)


def test_reference_groups_of_8_ranks():
    fold = derive(8, Parallelism(cp=2, tp=2, experts=Experts(ep=8)))
    assert text(groups(fold, "attention", "tp")) == "01|23|45|67"
    assert text(groups(fold, "attention", "cp")) == "02|13|46|57"
    assert text(groups(fold, "attention", "dp")) == "04|15|26|37"
    assert text(groups(fold, "experts", "ep")) == "01234567"
    fold = derive(8, Parallelism(cp=2, tp=2, experts=Experts(ep=2, etp=2)))
    assert text(groups(fold, "experts", "etp")) == "01|23|45|67"
    assert text(groups(fold, "experts", "ep")) == "02|13|46|57"
    assert text(groups(fold, "experts", "edp")) == "04|15|26|37"
    assert text(groups(fold, "experts", ("ep", "etp"))) == "0123|4567"


def test_reference_groups_of_16_ranks():
    fold = derive(16, Parallelism(pp=2, cp=2, tp=2, experts=Experts(ep=4)))
    assert groups(fold, "attention", "pp") == [(rank, rank + 8) for rank in range(8)]
    assert groups(fold, "experts", "pp") == groups(fold, "attention", "pp")
    assert groups(fold, "experts", "ep") == [tuple(range(first, first + 4)) for first in (0, 4, 8, 12)]
    assert groups(fold, "experts", "edp") == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]


def test_dp_is_both_data_axes():
    fold = derive(8, Parallelism(dp_replicate=2, tp=2))
    assert groups(fold, "attention", "dp") == groups(fold, "attention", ("dp_replicate", "dp_shard"))
    assert text(groups(fold, "attention", "dp")) == "0246|1357"
    assert text(groups(fold, "attention", "dp_shard")) == "02|13|46|57"
    assert text(groups(fold, "attention", "dp_replicate")) == "04|15|26|37"


@given(folds(), st.sampled_from(COMBINATIONS))
def test_groups_partition_the_world(fold, combination):
    view, axes = combination
    all_groups = groups(fold, view, axes)
    assert sorted(rank for group in all_groups for rank in group) == list(range(fold.world))
    assert all(len(group) == prod(getattr(fold, axis) for axis in axes) for group in all_groups)
    assert all(list(group) == sorted(group) for group in all_groups)
    assert all_groups == sorted(all_groups)
    assert all_groups == groups(fold, view, tuple(reversed(axes)))


@given(folds(), st.sampled_from(COMBINATIONS))
def test_group_of_agrees_with_groups(fold, combination):
    view, axes = combination
    for group in groups(fold, view, axes):
        for rank in group:
            assert group_of(fold, view, axes, rank) == group


@given(folds(), st.sampled_from(COMBINATIONS))
def test_a_group_differs_in_its_own_axes_only(fold, combination):
    view, axes = combination
    for group in groups(fold, view, axes):
        places = [coordinates(fold, view, rank) for rank in group]
        others = [name for name in VIEWS[view] if name not in axes]
        assert len({tuple(place[name] for name in others) for place in places}) == 1
        assert len({tuple(place[name] for name in axes) for place in places}) == len(group)


@given(folds())
def test_both_views_fill_the_same_stages(fold):
    assert fold.dp_replicate * fold.dp_shard * fold.cp * fold.tp == fold.stage
    assert fold.edp_replicate * fold.edp * fold.ep * fold.etp == fold.stage
    assert fold.pp * fold.stage == fold.world
    stages = [tuple(range(first, first + fold.stage)) for first in range(0, fold.world, fold.stage)]
    assert groups(fold, "attention", ("dp", "cp", "tp")) == stages
    assert groups(fold, "experts", ("edp_replicate", "edp", "ep", "etp")) == stages
    assert groups(fold, "attention", "pp") == groups(fold, "experts", "pp")


@given(folds())
def test_coordinates_count_ranks_in_mesh_order(fold):
    for view, axes in ("attention", fold.attention_axes), ("experts", fold.expert_axes):
        places = product(*(range(size) for size in axes.values()))
        for rank, place in enumerate(places):
            assert coordinates(fold, view, rank) == dict(zip(axes, place, strict=True))


@settings(max_examples=100)
@given(folds(), st.integers(1, 100), st.sampled_from(COMBINATIONS))
def test_crossing_agrees_with_counting(fold, node, combination):
    view, axes = combination
    first, last = VIEWS[view].index(axes[0]), VIEWS[view].index(axes[-1])
    axes = VIEWS[view][first : last + 1]
    cross = [len({rank // node for rank in group}) > 1 for group in groups(fold, view, axes)]
    assert crossing(fold, view, axes, node) == ("all" if all(cross) else "some" if any(cross) else "none")


def traced(function, *arguments):
    """What it returns, and how many lines of Python that took."""
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function(*arguments)
    finally:
        sys.settrace(before)
    return result, lines


def test_a_rank_of_16384_answers_at_once():
    fold = derive(16384, Parallelism(pp=16, dp_replicate=2, cp=4, tp=8, experts=Experts(ep=32, etp=2)))
    for rank in (0, 9_999, 16_383):
        for view, axes in COMBINATIONS:
            group, lines = traced(group_of, fold, view, axes, rank)
            assert rank in group
            assert len(group) == prod(getattr(fold, axis) for axis in axes)
            assert lines < 100 + 4 * len(group), "it looks at ranks of other groups"


def test_impossible_questions():
    fold = derive(8, Parallelism(tp=2))
    with pytest.raises(ValueError, match="rank 8 is not in a world of 8 ranks: use 0 to 7"):
        group_of(fold, "attention", "tp", 8)
    with pytest.raises(ValueError, match="'ep' is not an axis of the attention view: use pp, dp_replicate"):
        groups(fold, "attention", "ep")
    with pytest.raises(ValueError, match="'moe' is not a view: use 'attention' or 'experts'"):
        groups(fold, "moe", "ep")


def test_a_blocking_group_has_the_names_of_its_axes() -> None:
    fold = derive(16, Parallelism(pp=2, cp=2, tp=2, experts=Experts(ep=2, etp=4)))
    assert axes_of(fold, "blocking", group_of(fold, "attention", "tp", 0)) == "tp"
    assert axes_of(fold, "blocking", group_of(fold, "experts", "etp", 0)) == "cp x tp = etp"
    assert axes_of(fold, "blocking", group_of(fold, "attention", "pp", 0)) == "pp"
    assert axes_of(fold, "blocking", group_of(fold, "attention", ("pp", "tp"), 0)) == "pp x tp"
    fold = derive(8, Parallelism(tp=4, experts=Experts(etp=2)))
    assert axes_of(fold, "blocking", group_of(fold, "experts", "etp", 0)) == "etp"
