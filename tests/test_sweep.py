"""The whole sweep as a test: pytest -m sweep."""

from __future__ import annotations

import pytest

from tests import sweep


def test_the_sweep_holds_every_mapping_of_8_ranks() -> None:
    assert len(sweep.default_kinds()) == 517


@pytest.mark.sweep
def test_every_legal_mapping() -> None:
    done = sweep.run(sweep.ROOT / "runs" / "parity.jsonl")
    assert len(done) == len(sweep.cases())
    assert not [name for name, line in done.items() if line["failure"]]
