"""Reads slow_cases.toml: which tests `make test` leaves to `pytest -m slow`, and which quicker test replaces each."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from titanmoe.config.recipe import toml_module

TABLE = Path(__file__).with_suffix(".toml")
PROBLEMS = pytest.StashKey[list[str]]()
"""Key of the problems that tests/conftest.py found in the table when all tests were collected."""


def quick_tests() -> dict[str, str]:
    """Return for each slow test the quicker test that runs instead, both as pytest's ids."""
    return {wider: quick for quick, left_out in toml_module().loads(TABLE.read_text()).items() for wider in left_out}


def table_problems(table: dict[str, str], tests: Collection[str]) -> list[str]:
    """Return a line for each thing that is wrong with the table that `quick_tests` returns; [] if nothing is.

    A test of either side must exist, and a quick one not be slow itself. `tests` are the ids of all tests collected.
    """
    gone = sorted({*table, *table.values()}.difference(tests))
    absent = sorted(set(table.values()) & set(table))
    return [
        *(f"tests/support/slow_cases.toml names {test}, and there is no such test" for test in gone),
        *(f"tests/support/slow_cases.toml leaves out {test}, which stands in for others" for test in absent),
    ]
