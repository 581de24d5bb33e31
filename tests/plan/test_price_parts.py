"""docs/benchmarks.md says where a step of the recipes goes as the planner prices it."""

from __future__ import annotations

import pytest

from scripts.price_parts import COLUMNS, PAGE, RECIPES, STEPS, TIMES_AS_MUCH, own_rows, step_rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_table_is_what_the_planner_says(recipe: str) -> None:
    text, rows = PAGE.read_text(), own_rows(recipe)
    for row in rows:
        assert "| " + " | ".join(row) + " |" in text, "run scripts/price_parts.py again"
    step, parts = float(rows[-1][2]), [float(cell or 0) for cell in rows[-1][4:-1]]
    assert len(parts) == len(COLUMNS) and sum(parts) == pytest.approx(step, abs=0.05)


@pytest.mark.parametrize("recipe", STEPS)
def test_what_each_step_changed_is_what_the_planner_says(recipe: str) -> None:
    text, rows = PAGE.read_text(), step_rows(recipe)
    assert all("| " + " | ".join(row) + " |" in text for row in rows), "run scripts/price_parts.py again"
    assert [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)


def test_what_torchtitan_has_more_of_is_what_the_roofline_counts() -> None:
    text = PAGE.read_text()
    for name, recipe in (("Qwen3-30B-A3B", "qwen3_30b_a3b"), ("DeepSeek-V3", "deepseek_671b")):
        sides = []
        for side in ("titanmoe", "TorchTitan"):
            (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} | {side} |"))
            cells = [cell.strip().removesuffix(" KB") for cell in line.strip("| ").split("|")]
            sides.append([[float(number) for number in cells[i].split(" + ")] for i in (2, 6)])
        (kernels, moved), (their_kernels, their_moved) = sides
        more, kernel_ratio = TIMES_AS_MUCH[recipe]
        assert more == pytest.approx([b / a for a, b in zip(moved, their_moved, strict=True)])
        assert kernel_ratio == pytest.approx(sum(their_kernels) / sum(kernels))
