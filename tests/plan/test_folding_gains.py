"""docs/folding.md's tables of what folding gains: its mappings are legal, and cost what it says."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from titanmoe.config.recipe import shipped_recipes
from titanmoe.fold.degrees import derive
from titanmoe.fold.legality import violations
from titanmoe.plan.devices import read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.plan_table import TIE
from titanmoe.plan.price import Pricer
from titanmoe.plan.search import OneMesh, is_unfolded

RECIPES = [name for name in shipped_recipes() if "debug" not in name]


def test_folding_gains_what_the_page_says(script: ModuleType) -> None:
    device = read_device("h100")
    gains = [json.loads(line) for line in script.FOLDING.read_text().splitlines()]
    assert [(row["recipe"], row["setting"]) for row in gains] == [(r, s) for r in RECIPES for s in script.SETTINGS]
    assert script.folding_tables(gains) in script.FOLDING_PAGE.read_text()
    for row in gains:
        for kind, prices in (("best", Pricer), ("unfolded", OneMesh)):
            if kind not in row:
                continue
            mapping = [f"--{key}={value}" for key, value in row[kind].items() if key not in ("seconds", "kind")]
            config = script.recipe(row["recipe"], [*row["changed"], *mapping])
            fold = derive(row["ranks"], config.parallelism)
            assert not violations(config, row["ranks"])
            seconds = prices(config, device, Factors()).price(config, fold).step
            again = "run scripts/planner_page.py --folding again"
            assert seconds == pytest.approx(row[kind]["seconds"], rel=1e-3), f"{row['recipe']}: {again}"
            assert kind == "best" or (is_unfolded(fold) and script.gain(row) >= 0)


def test_readme_has_two_rows_of_it(script: ModuleType) -> None:
    gains = [json.loads(line) for line in script.FOLDING.read_text().splitlines()]
    known = script.table_of(script.FOLDING_HEAD, [script.folding_cells(row) for row in gains])
    readme = (script.ROOT / "README.md").read_text().partition("## When folding pays")[2].partition("\n## ")[0]
    rows = [line for line in readme.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 2 and all(row in known for row in rows)
    found = [script.gain(row) for row in gains if "unfolded" in row]
    large, none = sum(x > TIE for x in found), sum(x <= 0.005 for x in found)
    ties = len(gains) - large - none
    text = " ".join(readme.split())
    assert f"for {len(RECIPES)} recipes in three settings" in text
    assert f"Of [{len(gains)} cases](" in text
    assert f"in {large}; in {none} under 0.5 %; the other {ties} are ties." in text


def test_a_group_of_ep_on_one_mesh_leaves_the_node(script: ModuleType) -> None:
    device = read_device("h100")
    for cp, slower in ((1, False), (2, True)):
        changed = ["--parallelism.pp=8", "--parallelism.tp=1", f"--parallelism.cp={cp}", "--parallelism.experts.ep=8"]
        config = script.recipe("mixtral_8x22b", [*changed, "--parallelism.experts.etp=1"])
        fold = derive(128, config.parallelism)
        one_mesh, folded = (kind(config, device, Factors()).price(config, fold) for kind in (OneMesh, Pricer))
        assert (one_mesh.components["dispatch and combine"] > folded.components["dispatch and combine"]) == slower
