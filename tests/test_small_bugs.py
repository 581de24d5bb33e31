"""The table of bugs follows the code, and a file says which test notices each. The runs are made by hand."""

from __future__ import annotations

import ast
import json

from tests.support import plant_small_bugs
from tests.support.small_bugs import MUTANTS


def test_every_change_can_be_planted_and_is_python() -> None:
    """If this fails, the code has changed, and tests/support/small_bugs.py has to follow."""
    for mutant in MUTANTS:
        _, text = plant_small_bugs.plant(mutant)
        ast.parse(text)
        assert mutant.old != mutant.new


def test_a_test_that_notices_each_is_recorded() -> None:
    """If this fails: python -m tests.support.plant_small_bugs"""
    rows = [json.loads(line) for line in plant_small_bugs.NOTICED.read_text().splitlines()]
    assert [row["breaks"] for row in rows] == [mutant.breaks for mutant in MUTANTS]
    for row in rows:
        file, test = row["noticed"].split("::")
        assert f"def {test}(" in (plant_small_bugs.ROOT / file).read_text(), row
