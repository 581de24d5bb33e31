"""docs/fine-tuning.md: its files are written and its commands run; train_configs/sft_debug.toml and dpo_debug.toml
run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_get_started import BLOCK, ROOT, Newcomer

ANSWER = "Oslo."
DATA = "chats.jsonl", "pairs.jsonl"


class FineTuner(Newcomer):
    def types(self, line: str) -> None:
        said, pipe, command = line.partition(" | ")
        if not pipe:
            return super().types(line)
        words = shlex.split(command)
        text = subprocess.run(said, shell=True, check=True, capture_output=True, text=True).stdout
        self.said.setdefault(" ".join(words[:2]), []).append(self.has(["-m", *words], said=text))

    def trains(self, words: list[str]) -> str:
        return self.has(["-m", "titanmoe", *words])


def test_the_page_works_from_top_to_bottom_and_so_does_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for folder in ("scripts", "train_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    page, user = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8"), FineTuner(tmp_path)
    page = page.partition("\n## Adapters (LoRA)")[0]  # the sections from there on have no recipes of their own
    for file, language, text in BLOCK.findall(page):
        if language == "console":
            for command in text.splitlines():
                user.types(command.removeprefix("$ "))
        elif file:
            (tmp_path / file).write_text(text, encoding="utf-8")
        else:
            assert language == "json" and any(text in (tmp_path / name).read_text() for name in DATA)

    said = user.said
    trained, preferred = said["titanmoe train"]
    assert re.search(r"^begins from +weights of models/small *$", trained, re.MULTILINE)
    assert re.search(r"^epochs +30 of every source: [\d,]+ sequences in (\d+) steps", trained, re.MULTILINE)
    assert re.search(r"^packing +best_fit *$", trained, re.MULTILINE)
    assert re.search(r"^experts +ep 2 *$", trained, re.MULTILINE)
    assert said["titanmoe generate"] == [f"{ANSWER}\n"] and said["python ask.py"] == [f"{ANSWER}\n"]

    (counted,) = re.findall(r"^reference +(\w{16}), computed now$", said["titanmoe score"][0], re.MULTILINE)
    assert re.search(rf"^reference +{counted}, stored before *$", preferred, re.MULTILINE)
    assert "loss 0.6931" in preferred and re.search(r"^step 11/11 .* accuracy 100.0% .* val accuracy", preferred, re.M)

    recipe = ["-m", "titanmoe", "train", "train_configs/sft_debug.toml", "--training.epochs", "1"]
    debug, again = user.has(recipe), user.has(recipe)
    assert re.search(r"^epochs +1 of every source: [\d,]+ sequences in 2 steps", debug, re.MULTILINE)
    assert "val loss" in debug and "\ndone       step 2 of 2 " in debug
    assert "has made 2 steps, and training.epochs = 1\n" in again and "--training.epochs 2\n" in again


def test_the_script_ends_with_the_same_answers_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, f"{ROOT}/scripts/fine_tune.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("sft_debug", "sft_lora"):
        same = f"runs/{name}: 12 answers, 12 of them right, the same in transformers with exported/{name}\n"
        assert same in done.stdout
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and "is not empty" in again.stderr
