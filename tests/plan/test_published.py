"""Published runs: what the page says of them is what the code gives, and nothing is fitted to a row by itself."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.published_runs import PublishedFactors, RunPricer, device_of, run_of
from titanmoe.fold.degrees import derive
from titanmoe.plan.memory import rank_memories
from titanmoe.plan.plan_table import ERROR
from titanmoe.rehearse.rehearsal import recipe_to_rehearse
from titanmoe.text_report import format_bytes

ROOT = Path(__file__).resolve().parents[2]


def steps(script: ModuleType, rows: list[dict[str, Any]], factors: PublishedFactors) -> dict[str, float]:
    return {row["id"]: script.predict(row, factors).price.step for row in rows if not script.why_not(row)}


def slower(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Rows of which one took a fifth longer."""
    changed = {"tflops_per_gpu": lambda x: x and x / 1.2, "step_s": lambda x: x and 1.2 * x}
    return [
        row | {key: change(row[key]) for key, change in changed.items()} if row["id"] == name else row for row in rows
    ]


def test_every_row_is_there_with_its_source(script: ModuleType) -> None:
    rows = script.read_rows()
    assert len(rows) == 95 and all(row["source"] for row in rows)
    assert set(script.CALIBRATION) <= {row["id"] for row in rows} and len(script.CALIBRATION) <= 8
    assert len(asdict(PublishedFactors())) <= 8


def test_a_row_moves_no_prediction_unless_it_is_one_of_the_fit(script: ModuleType) -> None:
    rows = script.read_rows()
    fitted = script.fit(rows)
    assert asdict(fitted) == pytest.approx(asdict(PublishedFactors()), rel=0.01)
    before = steps(script, rows, fitted)
    other = slower(rows, name_of_row := "mpf-t3-llama3-8x70b-folding-256g-s4096")
    assert script.published_step(next(r for r in other if r["id"] == name_of_row)) > 1.1 * before[name_of_row]
    assert steps(script, other, script.fit(other)) == before
    moved = steps(script, rows, script.fit(slower(rows, "mpf-t3-mixtral-8x22b-mcore-128g-s4096")))
    assert max(abs(moved[name] / step - 1) for name, step in before.items()) > 0.01


def test_the_page_is_what_the_rows_give(script: ModuleType) -> None:
    scored = script.judged(script.read_rows(), PublishedFactors())
    text = "".join((ROOT / "docs" / page).read_text() for page in ("planner.md", "planner_rows.md"))
    for table in (
        script.verdicts(scored),
        script.summary(scored),
        script.conventions(script.read_rows(), PublishedFactors()),
        [script.cells(one) for one in scored if script.cause(one)],
    ):
        for cells in table:
            assert "| " + " | ".join(cells) + " |" in text
    assert script.EVERY.read_text() == script.every_row(PublishedFactors())
    held_out_errors = [abs(row.error) for row in scored if row.published and not row.calibration]
    assert round(script.median(held_out_errors), 2) == ERROR  # by which a search's mappings are ties


def test_memory_runs_out_where_it_did_and_nowhere_else(script: ModuleType) -> None:
    scored = script.judged(script.read_rows(), PublishedFactors()) + script.judged(
        script.read_rows(script.LATER), PublishedFactors()
    )
    assert [one.row["id"] for one in scored if one.oom] == [one.row["id"] for one in scored if not one.predicted.fits]
    assert sum(one.oom for one in scored) == 2


def row_named(script: ModuleType, start: str) -> dict[str, Any]:
    return next(row for row in script.read_rows() if row["id"].startswith(start))


def test_a_batch_in_pieces_has_a_bubble_for_each(script: ModuleType) -> None:
    row, factors = row_named(script, "automodel-dsv3-1024"), PublishedFactors()
    whole, pieces = (script.predict(row | {"pieces": n, "vpp": 1}, factors).price for n in (1, 4))
    assert pieces.components["bubble"] == pytest.approx(4 * whole.components["bubble"])
    assert pieces.step - whole.step == pytest.approx(3 * whole.components["bubble"])


def test_tokens_that_choose_neighbours_visit_one_node(script: ModuleType) -> None:
    run = run_of(row_named(script, "automodel-dsv3-1024"))
    assert run.neighbours and RunPricer(run, device_of("H100"), PublishedFactors()).visits(8) == 1


def test_the_memory_of_published_fine_tuning_is_beside_the_plan(script: ModuleType) -> None:
    row = next(row for row in script.read_rows(script.LATER) if row["framework"] == "TRL")
    asked = f"--training.seq_len {row['seq']} --training.local_batch_size 1 --training.global_batch_size {row['gbs']}"
    asked += f" --parallelism.cp 8 --parallelism.experts.ep {row['ep']} --training.dtype bfloat16"
    page = (ROOT / "docs" / "planner_rows.md").read_text()
    assert asked in " ".join(page.split())
    peaks = {}
    for dtype in ("bfloat16", "float32"):
        recipe = ["--config", "train_configs/sft_qwen3_30b_a3b.toml", *asked.split(), "--training.dtype", dtype]
        config = recipe_to_rehearse(recipe, row["gpus"], "h100")
        peaks[dtype] = rank_memories(config, derive(row["gpus"], config.parallelism))[0].peak
    published, planned = row["peak_mem_gib"] * 1e9, peaks["bfloat16"]
    figures = f"| {format_bytes(published)} | {format_bytes(planned)} | {planned / published - 1:+.1%} |"
    assert figures in page and f"in float32 it would be {format_bytes(peaks['float32'])}" in page


def test_the_memory_of_published_fine_tuning_in_its_own_mapping() -> None:
    page = (ROOT / "docs" / "planner_rows.md").read_text()
    asked = re.search(r"`glm4_5_air` with\n`(.*?)`", page, re.DOTALL)[1].split()
    config = recipe_to_rehearse(["--config", "train_configs/glm4_5_air.toml", *asked], 64, "h100")
    planned = rank_memories(config, derive(64, config.parallelism))[0].peak
    assert f"| 41 GB | {format_bytes(planned)} | {planned / 41e9 - 1:+.1%} |" in page
