"""The table of bugs follows the code, and the page says which test notices each. The runs are made by hand."""

from __future__ import annotations

import ast

from tests.support import plant_small_bugs
from tests.support.small_bugs import MUTANTS


def test_every_change_can_be_planted_and_is_python() -> None:
    """If this fails, the code has changed, and tests/support/small_bugs.py has to follow."""
    for mutant in MUTANTS:
        ast.parse(plant_small_bugs.planted(mutant))
        assert mutant.old != mutant.new


def test_no_change_is_there_twice_and_all_parts_are_met() -> None:
    assert len({(mutant.file, mutant.old) for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} == {
        *("ops", "moe", "models", "parallel", "train", "checkpoint", "data"),
    }


def test_the_page_names_the_test_that_notices_each() -> None:
    """If this fails: python -m tests.support.plant_small_bugs"""
    page = plant_small_bugs.PAGE.read_text()
    lines = page.partition(plant_small_bugs.BEGIN)[2].partition(plant_small_bugs.END)[0].strip().splitlines()
    noticed = dict(line.removesuffix("` |").rsplit(" `", 1) for line in lines[2:])
    assert noticed.keys() == {plant_small_bugs.row(mutant) for mutant in MUTANTS}
    for name in noticed.values():
        file, test = name.split("::")
        assert f"def {test}(" in (plant_small_bugs.ROOT / file).read_text(), name
