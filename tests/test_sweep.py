"""The sweep deals out its choices evenly, and its page agrees with its rows; the sweep as a test: pytest -m sweep."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import parity, sweep
from tests.support.case_features import CP_KINDS, FEATURES, OPTIONS, SCHEDULES
from tests.support.covering_mappings import all_folds, degrees


def test_every_mapping_of_8_ranks_and_every_choice_meets_many() -> None:
    every = [case for case in sweep.cases().values() if case.set == "all"]
    assert len(every) == len({case.fold for case in every}) == 517
    for feature, choices in FEATURES.items():
        if feature in sweep.NOT_DEALT:
            continue
        met = Counter(case.choices[feature] for case in every if feature in case.choices)
        assert met.keys() == choices.keys()
        assert max(met.values()) - min(met.values()) <= 1, met


def test_pairs_of_schedules_and_cp_kinds_all_meet() -> None:
    some = [case.choices for case in sweep.cases().values() if case.set == "pairs"]
    met = {(choice.get("schedule"), choice.get("cp")) for choice in some}
    assert not {(schedule, kind) for schedule in SCHEDULES for kind in CP_KINDS} - met


def met_degrees(some: list[sweep.Case], feature: str) -> set[tuple[str, str, int]]:
    return {(case.choices[feature], *degree) for case in some for degree in degrees(case.fold).items()}


EVERY_DEGREE = {degree for fold in all_folds(8) for degree in degrees(fold).items()}


def test_adapters_and_frozen_weights_meet_every_degree() -> None:
    some = [case for case in sweep.cases().values() if case.set == "part"]
    assert met_degrees(some, "trained") == {(what, *degree) for what in ("adapters", "part") for degree in EVERY_DEGREE}
    assert any(case.fold.etp > 1 and case.fold.ep == 1 and case.fold.tp != case.fold.etp for case in some)


def test_options_meet_every_degree_that_they_can() -> None:
    some = [case for case in sweep.cases().values() if case.set == "option"]
    shared = {("accumulated", "edp", n) for n in (2, 4, 8)}
    every = {(option, *degree) for option in OPTIONS for degree in EVERY_DEGREE}
    assert met_degrees(some, "option") == every - shared
    assert {case.changes["activation_checkpoint.mode"] for case in some if case.choices["option"] == "rows_kept"} == {
        "full_but_rows"
    }


@pytest.mark.parametrize("optimizer", sweep.ROWS)
def test_the_page_says_what_the_rows_say_and_each_row_is_a_case(optimizer: str) -> None:
    """If this fails: run python -m tests.sweep --optimizer NAME again."""
    rows, cases = sweep.read(sweep.ROWS[optimizer]), sweep.cases(optimizer)
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        case = cases[row["name"]]
        assert (row["set"], row["choices"], row["failure"]) == (case.set, case.choices, "")
    assert max(error for row in rows for error in row["errors"].values()) <= parity.TOLERANCE["float64"]
    begin, end = sweep.marks(optimizer)
    table = sweep.PAGE.read_text().partition(begin)[2].partition(end)[0]
    assert table.strip() == sweep.page(rows, optimizer)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", sweep.ROWS)
def test_every_legal_mapping(optimizer: str) -> None:
    done = sweep.run(optimizer)
    assert done.keys() == sweep.cases(optimizer).keys()
    assert not [name for name, row in done.items() if row["failure"]]
