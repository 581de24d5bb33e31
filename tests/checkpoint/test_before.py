"""A recipe and a checkpoint of an earlier commit still load, and training goes on from them as it did then.

before/ was made at commit 667bc3f: a recipe that names every key of that time, the checkpoint after step 3 of its run
on 2 ranks, and that run's metrics.jsonl, to its last step. It is never made again: names that have changed since are in
titanmoe.config.old_names.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import parity, world
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.manifest import flatten_record
from titanmoe.config import old_names
from titanmoe.config.fields import fields, toml_value
from titanmoe.config.recipe import read_recipe

BEFORE = Path(__file__).parent / "before"
SAVED = "checkpoints/step-00000003"


def lines(file: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(json.loads, file.read_text().splitlines())}


def names(metrics: dict[int, dict[str, Any]]) -> set[str]:
    return {name for line in metrics.values() for name in line}


def recipe() -> dict[str, Any]:
    """Return the recipe with the names that its keys have now, by path."""
    data = read_recipe(str(BEFORE / "recipe.toml")).data
    old_names.rename(data)
    return flatten_record(data)


def test_every_key_of_the_recipe_is_a_field() -> None:
    assert len(recipe()) > 150 and recipe().keys() <= fields().keys()


def test_a_run_resumes_from_the_checkpoint_as_it_did_then(tmp_path: Path) -> None:
    shutil.copytree(BEFORE / "checkpoints", tmp_path / "run/checkpoints")
    (tmp_path / "run.toml").write_text("".join(f"{path} = {toml_value(value)}\n" for path, value in recipe().items()))
    options = ["--job.dump_folder", str(tmp_path), "--checkpoint.interval", "1"]
    world.run(2, parity.train, ["--config", str(tmp_path / "run.toml"), *options])

    then, now = lines(BEFORE / "metrics.jsonl"), lines(tmp_path / "run/metrics.jsonl")
    assert list(now) == [4, 5, 6] and names(then) <= names(now)
    for step, line in now.items():
        for name in ("loss", "grad_norm", "lr", "tokens", "aux_loss", "aux_loss_global", "z_loss"):
            assert line[name] == pytest.approx(then[step][name], rel=1e-4), (step, name)
    events = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    assert [(line["step"], line["kind"]) for line in events] == [(3, "restart"), (4, "save"), (5, "save"), (6, "save")]

    before, after = BEFORE / SAVED, tmp_path / "run/checkpoints/step-00000006"
    old, new = (json.loads((path / "tensors.json").read_text()) for path in (before, after))
    assert old.keys() == new.keys()
    old, new = (layout.read_manifest(path).record for path in (before, after))
    assert old.keys() <= new.keys()
    assert all(values.keys() <= new["config"][table].keys() for table, values in old["config"].items())
