"""Options under the names of earlier versions: read in records, refused in recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import folders
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.manifest import recorded_fields
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.components import COMPONENTS
from titanmoe.config import old_names
from titanmoe.config.fields import fields
from titanmoe.config.load import ConfigError, read_draft
from titanmoe.config.old_names import NewName

ROWS = {
    "optimizer.rate": NewName("optimizer.lr"),
    "model.theta": NewName("model.rope_theta"),
    "sums.halved": NewName("moe.z_loss", lambda value: 0.5 * value or None),
    "sums.also": NewName("moe.z_loss", float),
}


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in ROWS.items():
        monkeypatch.setitem(old_names.OLD_NAMES, old, new)


def recorded(tmp_path: Path, config: dict[str, Any]) -> dict[str, Any]:
    path = folders.make(tmp_path, 3)
    folders.rewrite(path, record={"config": config})
    return recorded_fields(layout.read_manifest(path).record, path / layout.MANIFEST)


def test_every_new_name_is_a_field_and_no_old_one_is() -> None:
    assert fields().keys().isdisjoint(old_names.OLD_NAMES)
    new = {row.path for row in old_names.OLD_NAMES.values() if isinstance(row, NewName)}
    assert new and new <= fields().keys()


def test_a_record_with_old_names_is_read(tmp_path: Path) -> None:
    old = {
        "checkpoint": {"local": True, "interval": 7},
        "optimizer": {"rate": 0.25},
        "model": {"theta": 5.0, "change": ["theta", "rope_factor", "checkpoint.local"]},
        "sums": {"halved": 3.0, "also": 4.0},
    }
    assert recorded(tmp_path, old) == {
        "checkpoint.interval": 7,
        "optimizer.lr": 0.25,
        "model.rope_theta": 5.0,
        "model.change": ["rope_theta", "rope_factor", "checkpoint.local"],
        "moe.z_loss": 1.5,
    }


def test_the_first_row_that_says_something_counts(tmp_path: Path) -> None:
    assert recorded(tmp_path, {"sums": {"halved": 0.0, "also": 4.0}}) == {"moe.z_loss": 4.0}


def test_a_new_name_counts_before_an_old_one(tmp_path: Path) -> None:
    assert recorded(tmp_path, {"sums": {"also": 4.0}, "moe": {"z_loss": 9.0}}) == {"moe.z_loss": 9.0}


OVERLAP = {
    "halves": {"moe": {"overlap_chunks": 1, "overlap_halves": True}, "pipeline": {"overlap_pairs": False}},
    "pairs": {"moe": {"overlap_chunks": -1, "overlap_halves": False}, "pipeline": {"overlap_pairs": True}},
    "auto": {"moe": {"overlap_chunks": -1, "overlap_halves": False}, "pipeline": {"overlap_pairs": False}},
    "": {"moe": {"overlap_chunks": 4, "overlap_halves": False}, "pipeline": {"overlap_pairs": False}},
}


@pytest.mark.parametrize("now", OVERLAP)
def test_three_options_that_became_one(tmp_path: Path, now: str) -> None:
    assert recorded(tmp_path, OVERLAP[now]) == ({"moe.overlap": now} if now else {})


@pytest.mark.parametrize("value", ["half", [1], {"a": 1}])
def test_an_old_value_that_cannot_be_converted_is_refused_under_the_new_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"moe.z_loss(\.a)? = "):
        recorded(tmp_path, {"sums": {"also": value}})


def refusal(tmp_path: Path, recipe: str, *words: str) -> str:
    (tmp_path / "recipe.toml").write_text(recipe)
    draft = read_draft([str(tmp_path / "recipe.toml"), *words], COMPONENTS)
    with pytest.raises(ConfigError) as refused:
        draft.finish(lambda config: [])
    return str(refused.value)


def test_a_recipe_with_old_names_is_refused_with_the_new_ones(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[optimizer]\nrate = 0.25\n[sums]\nhalved = 3.0\n[checkpoint]\nlocal = true\n")
    assert "recipe.toml:2: unknown key optimizer.rate: it is optimizer.lr now: write optimizer.lr = 0.25" in message
    assert "recipe.toml:4: unknown key sums.halved: it is moe.z_loss now: write moe.z_loss = 1.5" in message
    assert "recipe.toml:6: unknown key checkpoint.local: a run no longer keeps copies" in message
    message = refusal(tmp_path, "[sums]\nhalved = 0.0\n")
    assert "unknown key sums.halved: it is moe.z_loss now: leave it out" in message


def test_a_command_line_with_old_names_is_refused_with_the_new_ones(tmp_path: Path) -> None:
    words = ("--optimizer.rate", "0.25", "--sums.halved=3", "--checkpoint.local", "true")
    message = refusal(tmp_path, "", *words)
    assert "command line: unknown option --optimizer.rate: it is --optimizer.lr 0.25 now" in message
    assert "command line: unknown option --sums.halved: it is --moe.z_loss 1.5 now" in message
    assert "command line: unknown option --checkpoint.local: a run no longer keeps copies" in message


def test_answers_of_reinforcement_learning_are_completions(tmp_path: Path) -> None:
    assert recorded(tmp_path, {"rl": {"answers": 4}}) == {"rl.completions": 4}
    assert "rl.answers: it is rl.completions now: write rl.completions = 4" in refusal(tmp_path, "[rl]\nanswers = 4\n")
    assert "it is --rl.completions 4 now" in refusal(tmp_path, "", "--rl.answers", "4")


def test_an_old_choice_is_read_in_a_record_and_refused_in_a_recipe(tmp_path: Path) -> None:
    old, new = "full_but_rows", "full_except_dispatch"
    assert recorded(tmp_path, {"activation_checkpoint": {"mode": old}}) == {"activation_checkpoint.mode": new}
    message = refusal(tmp_path, f'[activation_checkpoint]\nmode = "{old}"\n')
    assert f'activation_checkpoint.mode = "{old}"' in message and f": it is called {new} now" in message


def test_booleans_that_became_choices_are_read_in_a_record_and_refused_in_a_recipe(tmp_path: Path) -> None:
    for old, text, new in ((True, "true", "rollout"), (False, "false", "off")):
        assert recorded(tmp_path / text, {"rl": {"replay": old}}) == {"rl.replay": new}
        message = refusal(tmp_path, f"[rl]\nreplay = {text}\n")
        assert f"rl.replay = {text} is not one of off, old, rollout: it is called {new} now" in message


def test_every_new_choice_is_one() -> None:
    for path, values in old_names.OLD_VALUES.items():
        assert set(values.values()) <= set(fields()[path].choices) and not values.keys() & set(fields()[path].choices)
