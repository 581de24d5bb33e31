"""The table of cases that `make test` leaves to `pytest -m slow`, each with a quick test that stands in for it."""

import pytest

from tests.support import slow_cases


def test_what_stands_in_for_a_slow_case_exists_and_runs(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.stash.get(slow_cases.PROBLEMS, []) == []
    table = {"a[wide]": "a[quick]", "b[wide]": "c"}
    assert slow_cases.table_problems(table, [*table, "a[quick]", "c"]) == []
    (gone,) = slow_cases.table_problems(table, ["a[wide]", "a[quick]", "c"])
    assert gone == "tests/support/slow_cases.toml names b[wide], and there is no such test"
    (absent,) = slow_cases.table_problems(table | {"a[quick]": "c"}, [*table, "a[quick]", "c"])
    assert absent == "tests/support/slow_cases.toml leaves out a[quick], which stands in for others"
