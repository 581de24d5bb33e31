"""scripts/bench/attention.py on a small grid: its counts agree with each other, and shared prompts cost less."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_a_small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import attention as bench

    from titanmoe.config.schema import Model
    from titanmoe.models.families import preset

    model = Model(**preset("qwen3_moe", "30b_a3b"))
    masks = "documents", "pairs, shared"
    rows = [row for name in masks for row in bench.make_rows(name, 4096, 2, 300, model)]
    assert len(rows) == 4 * len(masks)
    for row in rows:
        assert row.seen <= row.computed <= 1.2 * row.seen < row.causal and row.makespan >= 1
    ours = {row.mask: row for row in rows if (row.kind, row.backend) == ("ulysses", "ours")}
    assert ours["documents"].computed == ours["documents"].seen, "long documents are computed to the pair"
    assert bench.table(rows).count("\n") == len(masks) + 1
    assert bench.picture(rows).count("<polygon") == 3 * len(masks)
