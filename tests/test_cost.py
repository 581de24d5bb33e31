"""What tests cost is counted by folder, and what is too much is reported."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests import cost, wider


def report(nodeid: str, seconds: float, when: str = "teardown") -> Any:
    return SimpleNamespace(nodeid=nodeid, when=when, user_properties=[(cost.PROPERTY, seconds)])


def test_costs_are_by_folder_and_those_beyond_twice_the_budget_are_reported() -> None:
    bill = cost.Bill()
    for one in (
        report("tests/moe/test_router.py::test_a", 30.0),
        report("tests/moe/test_experts.py::test_b[x/y]", 40.0),
        report("tests/moe/test_experts.py::test_b[x/y]", 900.0, "call"),  # reported again at its end
        report("tests/test_parity.py::test_c", 21.0),
    ):
        bill.add(one)
    assert bill.spent == {"moe": 70.0, "test_parity": 21.0}
    assert bill.beyond({"moe": 25.0, "test_parity": 0.5}) == []
    (line,) = bill.beyond({"moe": 24.9, "test_parity": 0.5})
    assert line.startswith("tests/moe took 70.0 CPU-seconds, over 2 times its budget of 24.9")
    assert bill.beyond({"moe": 25.0})[0].startswith("tests/test_parity took 21.0")
    assert [line.split() for line in bill.lines({"moe": 25.0, "fold": 3.0})][1:] == [
        ["moe", "70.0", "25"],
        ["test_parity", "21.0", "0"],
        ["fold", "0.0", "3"],
        ["all", "91.0", "28"],
    ]


def test_every_folder_has_a_budget() -> None:
    places = {
        cost.place(f"tests/{path.relative_to(cost.BUDGET.parent)}") for path in cost.BUDGET.parent.rglob("test_*.py")
    }
    assert cost.read_budget().keys() == places - {"test_gpu"}


def test_a_child_that_has_ended_is_counted() -> None:
    meter = cost.Meter()
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert meter.read() > 0.25
    assert meter.read() < 0.25


def test_files_that_take_longest_exist_and_come_first() -> None:
    assert [name for name in cost.LONG if not (cost.BUDGET.parent / f"{name}.py").exists()] == []
    short, long = "tests/fold/test_fold_command.py::test_a", "tests/test_parity.py::test_b[x/y]"
    assert sorted([short, long], key=cost.turn) == [long, short]


def test_a_test_that_stands_in_for_others_exists_and_runs(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.stash.get(wider.PROBLEMS, []) == []
    table = {"a[wide]": "a[quick]", "b[wide]": "a[quick]"}
    assert wider.problems(table, [*table, "a[quick]", "c"]) == []
    (gone,) = wider.problems(table, ["a[wide]", "a[quick]"])
    assert gone == "tests/wider.toml names b[wide], and there is no such test"
    (absent,) = wider.problems(table | {"a[quick]": "c"}, [*table, "a[quick]", "c"])
    assert absent == "tests/wider.toml leaves out a[quick], which stands in for others"
