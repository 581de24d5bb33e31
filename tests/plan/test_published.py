"""Published runs: what the page says of them is what the code gives, and nothing is fitted to a row by itself."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config.load import load
from titanmoe.fold.degrees import derive
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import rank_memories
from titanmoe.plan.plan_table import RANGES, TIE
from titanmoe.plan.price import Pricer
from titanmoe.rehearse.rehearsal import recipe_to_rehearse


def steps(script: ModuleType, rows: list[dict[str, Any]], factors: Factors) -> dict[str, float]:
    return {one.row["id"]: one.price.step for one in script.priced_rows(rows, factors)}


def slower(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Rows of which one took a fifth longer."""
    changed = {"tflops_per_gpu": lambda x: x and x / 1.2, "step_s": lambda x: x and 1.2 * x}
    return [
        row | {key: change(row[key]) for key, change in changed.items()} if row["id"] == name else row for row in rows
    ]


def test_every_row_is_there_with_its_source(script: ModuleType) -> None:
    rows = script.read_rows()
    assert len(rows) == 106 and all(row["source"] for row in rows)
    assert sum(row.get("split") == "calibration" for row in rows) == len(script.PRIOR) == len(asdict(Factors()))
    priced = script.priced_rows(rows + script.read_rows(script.LATER), Factors())
    assert sum(one.fitted for one in priced) == 16
    listed = [sum(belongs(one.row) for belongs in script.SOURCES.values()) for one in priced]
    assert max(listed) == 1 and sum(listed) == len(priced), "each row belongs to one line of the page's table"


def test_a_row_moves_no_prediction_unless_it_is_one_of_the_fit(script: ModuleType) -> None:
    rows = script.read_rows()
    fitted = script.fit(rows)
    assert asdict(fitted) == pytest.approx(asdict(Factors()), rel=0.01)
    before = steps(script, rows, fitted)
    other = slower(rows, name_of_row := "mpf-t3-llama3-8x70b-folding-256g-s4096")
    assert script.published_step(next(r for r in other if r["id"] == name_of_row)) > 1.1 * before[name_of_row]
    assert steps(script, other, script.fit(other)) == before
    moved = steps(script, rows, script.fit(slower(rows, "mpf-t3-mixtral-8x22b-mcore-128g-s4096")))
    assert max(abs(moved[name] / step - 1) for name, step in before.items()) > 0.01


def test_the_pages_are_what_the_rows_give(script: ModuleType) -> None:
    rows = script.read_rows()
    rows = rows + script.read_rows(script.LATER)
    priced, shown = (script.priced_rows(rows, Factors(), comparable) for comparable in (True, False))
    assert [one.row["framework"] for one in shown] == ["FSDP"] * 3 + ["Megatron-Bridge"] * 5
    assert not any(one.row["comparable"] for one in shown)
    assert script.accuracy(priced, shown) in script.PAGE.read_text(), "run scripts/planner_page.py again"
    assert script.EVERY.read_text() == script.every_row(priced + shown)
    assert {kind: round(error, 2) for kind, error in script.ranges(priced, shown).items()} == RANGES


def test_no_verdict_of_the_planner_is_wrong(script: ModuleType) -> None:
    """Check that where the planner names the slower of two published mappings, it calls them a tie."""
    pairs, fastest, error = script.order(script.priced_rows(script.read_rows(), Factors()))
    assert round(error, 2) == TIE and len(fastest) == sum(fastest) == 13
    wrong = [1 / planned - 1 for _, planned in pairs if planned <= 1]
    assert len(wrong) == 2 and max(wrong) < TIE


def test_own_steps_on_an_h200_are_planned_as_the_page_says(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(script.ROOT / "scripts" / "bench"), *sys.path])
    from layers import recipe

    table = script.PAGE.read_text().partition("| layers | measured |")[2].partition("\n\n")[0].splitlines()[2:]
    for line, (model, layers, batch, tokens) in zip(
        table,
        [
            ("qwen3", 6, 8, 4096),
            ("gpt_oss", 4, 8, 4096),
            ("deepseek", 1, 4, 4096),
            ("qwen3", 6, 1, 4096),
            ("qwen3", 6, 8, 64),
        ],
        strict=True,
    ):
        config = load(
            recipe(model, "titanmoe", layers=layers, batch=batch, tiny=False, overrides=[f"training.seq_len={tokens}"]),
            COMPONENTS,
            lambda config: [],
        )
        step = Pricer(config, read_device("h200"), Factors()).price(config, derive(1, config.parallelism)).step
        _, measured, planned, errors = line.strip("| ").split(" | ")
        assert planned == f"{step * 1000:.0f} ms"
        assert errors == ", ".join(f"{1000 * step / int(ms) - 1:+.0%}" for ms in re.findall(r"\d+", measured))


def test_the_planner_is_as_right_as_it_has_to_be(script: ModuleType) -> None:
    priced = script.priced_rows(script.read_rows(), Factors())
    errors = {name: [one.error for one in priced if belongs(one.row)] for name, belongs in script.SOURCES.items()}
    fsdp2 = [error for name, found in errors.items() if "(fit)" in name or "FSDP2" in name for error in found]
    assert script.median(map(abs, fsdp2)) < 0.2 and abs(script.mean(fsdp2)) < 0.1
    paper = [error for name, found in errors.items() if "paper" in name for error in found]
    assert max(map(abs, paper)) < 0.25


def test_the_memory_of_published_runs_is_beside_the_plan(script: ModuleType) -> None:
    rows = script.read_rows() + script.read_rows(script.LATER)
    assert script.published_memory(rows) in script.PAGE.read_text(), "run scripts/planner_page.py again"
    peaks = {row["id"]: peaks for row, *_, peaks in script.published_peaks(rows)}
    errors = [planned / published - 1 for _, measures, published, planned in script.published_peaks(rows)]
    assert len(errors) >= 9 and script.median(map(abs, errors)) < 0.06
    asked = "--training.seq_len 2048 --training.local_batch_size 1 --training.global_batch_size 1 --parallelism.cp 8 "
    asked += "--parallelism.experts.ep 8 --training.dtype bfloat16"
    config = recipe_to_rehearse(["--config", "train_configs/sft_qwen3_30b_a3b.toml", *asked.split()], 8, "h100")
    assert rank_memories(config, derive(8, config.parallelism))[0].peak == peaks["later-trl-qwen30b"]
