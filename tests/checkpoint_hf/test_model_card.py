"""The model cards of exported folders: what they say, and what they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import world
from tests.checkpoint import runs
from tests.checkpoint_hf import adapted, models
from tests.checkpoint_hf.test_convert import convert
from titanmoe.checkpoint.hf.model_card import model_card

RECORD: dict[str, Any] = {"step": 1200, "tokens": 4096000, "versions": {"titanmoe": "0.1.0", "torch": "2.13.0"}}
RECORD["config"] = {
    "job": {"name": "capitals"},
    "data": {"paths": ["/home/me/secret/chats.jsonl", "hf:you/texts:train"]},
}
RECORD["config"] |= {"checkpoint": {"initial_hf": "Qwen/Qwen3-30B-A3B@main"}, "training": {"objective": "dpo"}}


def front(text: str) -> dict[str, Any]:
    lines = text.split("---\n")[1].splitlines()
    return {key: json.loads(value) for key, value in (line.split(": ", 1) for line in lines)}


def test_a_card_says_what_made_the_weights() -> None:
    card = model_card(RECORD | {"best": {"metric": "val_loss", "value": 1.23456, "step": 1100}})
    tags = ["titanmoe", "moe", "dpo"]
    assert front(card) == {"library_name": "transformers", "tags": tags, "base_model": "Qwen/Qwen3-30B-A3B"}
    for text in ("# capitals\n", "began from `Qwen/Qwen3-30B-A3B@main`",
                 "| `data` | `chats.jsonl, hf:you/texts:train` |",
                 "| `steps` | `1,200` |", "| `tokens` | `4,096,000` |", "| `best val_loss` | `1.2346 at step 1100` |",
                 '| `training.objective` | `"dpo"` |', "| `torch` | `2.13.0` |"):  # fmt: skip
        assert text in card, text
    assert "secret" not in card and "best" not in model_card(RECORD)


def test_nothing_in_a_record_breaks_out_of_the_card() -> None:
    hostile = {
        "job": {"name": "a\n---\nx: 1"},
        "data": {"paths": ["x` | <b>\n# y"]},
        "training": {"objective": ["dpo"]},
    }
    card = model_card({"step": 1, "tokens": 1, "best": ["x"], "config": hostile})
    assert card.count("\n---\n") == 1 and "\nx: 1" not in card and "\n# y" not in card and "`x_ _ <b> # y`" in card


def test_folders_of_runs_have_one_and_those_of_other_weights_none(tmp_path: Path) -> None:
    folder = models.save(models.make("qwen3_moe"), tmp_path / "in")
    world.run(1, runs.go, str(tmp_path), {"moe.bias_update_rate": 0.0}, 1)
    assert convert("--to-hf", tmp_path / "run", tmp_path / "out") == 0
    card = (tmp_path / "out/README.md").read_text()
    assert "# run\n" in card and "random weights" in card and "| `data` | `synthetic` |" in card and "lora" not in card
    assert convert("--from-hf", folder, tmp_path / "ours") == 0
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "back") == 0
    assert not (tmp_path / "back/README.md").exists()
    adapted.write(tmp_path / "adapters", folder)
    assert convert("--to-peft", tmp_path / "adapters", tmp_path / "peft") == 0
    card = (tmp_path / "peft/README.md").read_text()
    assert front(card) == {"library_name": "peft", "tags": ["titanmoe", "moe", "lora"]}
    assert "began from `in`" in card and "| `lora.rank` | `6` |" in card and str(tmp_path) not in card
