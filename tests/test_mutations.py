"""The table of bugs follows the code, and the page says which test notices each. The runs are made by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import mutations
from tests.mutants import MUTANTS, Mutant


def test_every_change_can_be_planted_and_is_python() -> None:
    """If this fails, the code has changed, and tests/mutants.py has to follow."""
    for mutant in MUTANTS:
        ast.parse(mutations.planted(mutant))
        assert mutant.old != mutant.new


def test_no_change_is_there_twice_and_all_parts_are_met() -> None:
    assert len({(mutant.file, mutant.old) for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} == {
        *("ops", "moe", "models", "parallel", "train", "checkpoint", "data"),
    }


def test_the_page_names_the_test_that_notices_each() -> None:
    """If this fails: python -m tests.mutations"""
    lines = mutations.PAGE.read_text().partition(mutations.BEGIN)[2].partition(mutations.END)[0].strip().splitlines()
    noticed = dict(line.removesuffix("` |").rsplit(" `", 1) for line in lines[2:])
    assert noticed.keys() == {mutations.row(mutant) for mutant in MUTANTS}
    for name in noticed.values():
        file, test = name.split("::")
        assert f"def {test}(" in (mutations.ROOT / file).read_text(), name


def test_what_pytest_says_is_read_right() -> None:
    failed = "FAILED tests/moe/test_router.py::test_ties[a - b] - assert 1 == 2\n1 failed in 0.1s\n"
    assert mutations.verdict(1, failed) == "tests/moe/test_router.py::test_ties"
    assert mutations.verdict(1, failed.replace("[a - b]", "")) == "tests/moe/test_router.py::test_ties"
    assert mutations.verdict(0, "1 passed") == mutations.SURVIVED
    for status in (2, 4, 5):  # nothing has run
        with pytest.raises(RuntimeError, match=f"pytest ended with {status}"):
            mutations.verdict(status, "ERROR tests/moe/test_router.py - SyntaxError")


def test_it_goes_on_where_it_stopped_with_what_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    def judge(mutant: Mutant, *_: object) -> str:
        judged.append(mutant)
        return mutations.SURVIVED if len(judged) == 2 else "tests/test_it.py::test_it"

    monkeypatch.setattr(mutations, "judge", judge)
    monkeypatch.setattr(mutations, "copied", lambda to: to)
    monkeypatch.setattr(mutations, "MUTANTS", MUTANTS[:3])
    results = tmp_path / "results.jsonl"
    assert list(mutations.run(results).values()).count(mutations.SURVIVED) == 1
    done = mutations.run(results)
    assert judged == [*MUTANTS[:3], MUTANTS[1]]
    assert mutations.table(done).splitlines()[2] == f"{mutations.row(MUTANTS[0])} `tests/test_it.py::test_it` |"
