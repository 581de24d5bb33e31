"""The sweep deals out its choices evenly, and its page agrees with its rows; the sweep as a test: pytest -m sweep."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests import parity, sweep, world
from tests.support.case_features import CP_KINDS, FEATURES, OPTIONS, SCHEDULES
from tests.support.covering_mappings import all_folds, degrees
from titanmoe.config.schema import Parallelism
from titanmoe.fold.degrees import derive


def test_every_mapping_of_8_ranks_and_every_choice_meets_many() -> None:
    every = [case for case in sweep.cases().values() if case.set == "all"]
    assert len(every) == len({case.fold for case in every}) == 517
    for feature, choices in FEATURES.items():
        if feature in sweep.NOT_DEALT:
            continue
        met = Counter(case.choices[feature] for case in every if feature in case.choices)
        assert met.keys() == choices.keys()
        deck = sweep.DECKS.get(feature, list(choices))
        rounds = [met[choice] / deck.count(choice) for choice in choices]
        assert max(rounds) - min(rounds) <= 1, met


def test_pairs_of_schedules_and_cp_kinds_all_meet() -> None:
    some = [case.choices for case in sweep.cases().values() if case.set == "pairs"]
    met = {(choice.get("schedule"), choice.get("cp")) for choice in some}
    assert not {(schedule, kind) for schedule in SCHEDULES for kind in CP_KINDS} - met


def met_degrees(some: list[sweep.Case], feature: str) -> set[tuple[str, str, int]]:
    return {(case.choices[feature], *degree) for case in some for degree in degrees(case.fold).items()}


EVERY_DEGREE = {degree for fold in all_folds(8) for degree in degrees(fold).items()}


def test_adapters_and_frozen_weights_meet_every_degree() -> None:
    some = [case for case in sweep.cases().values() if case.set == "part"]
    every = {(what, *degree) for what in ("adapters", "subset") for degree in EVERY_DEGREE}
    assert met_degrees(some, "trained") == every
    assert any(case.fold.etp > 1 and case.fold.ep == 1 and case.fold.tp != case.fold.etp for case in some)


def test_options_meet_every_degree_that_they_can() -> None:
    some = [case for case in sweep.cases().values() if case.set == "option"]
    shared = {("accumulated", "edp", n) for n in (2, 4, 8)}
    every = {(option, *degree) for option in OPTIONS for degree in EVERY_DEGREE}
    assert met_degrees(some, "option") == every - shared
    assert {
        case.changes["activation_checkpoint.mode"] for case in some if case.choices["option"] == "dispatch_saved"
    } == {"full_except_dispatch"}


@pytest.mark.parametrize("optimizer", sweep.ROWS)
def test_the_page_says_what_the_rows_say_and_each_row_is_a_case(optimizer: str) -> None:
    """If this fails: run python -m tests.sweep --optimizer NAME again."""
    rows, cases = sweep.read(sweep.ROWS[optimizer]), sweep.cases(optimizer)
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        case = cases[row["name"]]
        assert row["set"] == case.set and sweep.is_of(row, case)
        agrees = row["errors"] and max(row["errors"].values()) <= parity.TOLERANCE["float64"]
        assert row["failure"] or agrees, row["name"]
    begin, end = sweep.marks(optimizer)
    table = sweep.PAGE.read_text().partition(begin)[2].partition(end)[0]
    assert table.strip() == sweep.page(rows, optimizer)


@pytest.mark.parametrize("page", ["README.md", "docs/optimizers.md"])
def test_pages_say_how_many_mappings_agree_with_muon(page: str) -> None:
    said = sweep.agreeing(sweep.read(sweep.ROWS["muon"]), "muon")
    assert said in (sweep.ROOT / page).read_text()


FOLD = derive(2, Parallelism())


def test_a_mapping_outside_the_tolerance_has_a_row_with_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parity.TOLERANCE, "float64", 0.0)
    row = sweep.measured("dp_shard2", sweep.Case(FOLD, {}, "16"))
    assert re.match(r"OutsideTolerance: \w+ is off by \d", row["failure"])
    assert 0 < max(row["errors"].values()) < 1e-12 and {*sweep.COLUMNS} <= row["errors"].keys()


def test_failures_stay_in_rows_and_table_until_they_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (dict.fromkeys(sweep.COLUMNS, error) for error in (1e-15, 2e-3))
    outcomes: list[dict[str, float] | Exception] = []

    def check(*_: object, **__: object) -> dict[str, float]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    every = {name: sweep.Case(FOLD, {}, "16") for name in ("agrees", "differs", "hangs", "crashes")}
    rows, page = tmp_path / "rows.jsonl", tmp_path / "parity.md"
    page.write_text("{}\n{}\n".format(*sweep.marks("adamw")))
    monkeypatch.setattr(parity, "check", check)
    monkeypatch.setattr(sweep, "cases", lambda _: every)
    monkeypatch.setattr(sweep, "ROWS", {"adamw": rows})
    monkeypatch.setattr(sweep, "PAGE", page)

    def failures(*options: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["sweep", *options])
        failed = [row["name"] for row in sweep.read(rows) if row["failure"]] if sweep.main() else []
        assert not outcomes
        return failed

    hung = world.RankError("ranks [1] of 2 had not returned", {}, {1: "its stack"})
    outcomes += [good, parity.OutsideTolerance("grads is off by 2.0e-03", bad), hung, AssertionError()]
    assert failures() == ["differs", "hangs", "crashes"]
    assert "1 of 4 mappings agree, 4 were run" in page.read_text()
    assert "| 16 ranks | 4 | 3 | 2.0e-03 | 2.0e-03 |" in page.read_text()
    before = rows.read_text()
    assert failures("--minutes", "0") == ["differs", "hangs", "crashes"]
    assert rows.read_text() == before
    every["new"] = every["agrees"]
    outcomes += [good, good, hung, good]  # the new one first; what agrees is not run again
    assert failures() == ["hangs"]
    assert "4 of 5 mappings agree, 5 were run" in page.read_text()
    outcomes += [good]
    assert failures() == []
    assert "| 16 ranks | 5 | 0 | 1.0e-15 | 1.0e-15 |" in page.read_text()


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", sweep.ROWS)
def test_every_legal_mapping(optimizer: str) -> None:
    done = sweep.run(optimizer)
    assert done.keys() == sweep.cases(optimizer).keys()
    assert not [name for name, row in done.items() if row["failure"]]
