"""docs/evaluate.md: an exported model answers the page's questions, by transformers and by lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.checkpoint_hf import models
from titanmoe.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text()


def block(language: str) -> str:
    match = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert match
    return match[1]


QUESTIONS = [json.loads(line) for line in block("json").splitlines()]


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that titanmoe has written, and a tokenizer of the words that occur."""
    monkeypatch.chdir(tmp_path)
    words = {word for question in QUESTIONS for word in [*question["question"].split(), *question["choices"]]}
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *sorted(words)])}, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = models.save(models.make("qwen3_moe"), tmp_path / "hf")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["convert", "--from-hf", str(folder), str(tmp_path / "ours")]) == 0
    assert main(["convert", "--to-hf", str(tmp_path / "ours"), str(tmp_path / "exported")]) == 0
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "capitals.yaml").write_text(block("yaml"))
    (tmp_path / "tasks" / "capitals.jsonl").write_text(block("json"))
    return tmp_path / "exported"


def answers(exported: Path) -> list[list[float]]:
    """The log-likelihood of each choice, which is one token here."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    likelihoods = []
    for question in QUESTIONS:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(question["question"])])).logits[0, -1]
        choices = torch.tensor([tokenizer.encode(choice) for choice in question["choices"]])
        assert choices.shape == (3, 1) and (choices > 2).all()
        likelihoods.append(logits.log_softmax(-1)[choices[:, 0]].tolist())
    return likelihoods


def test_an_export_has_what_an_evaluation_needs(exported: Path) -> None:
    assert all(-20 < number < 0 for choices in answers(exported) for number in choices)


def test_the_harness_finds_the_same_answers(exported: Path) -> None:
    """By the page's own command."""
    pytest.importorskip("lm_eval")
    (command,) = re.findall(r"^\$ lm_eval (.* --include_path .*)$", PAGE, re.MULTILINE)
    run = subprocess.run(
        [sys.executable, "-m", "lm_eval", *shlex.split(command), "--log_samples", "--output_path", "found"],
        cwd=exported.parent,
        env=os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    (samples,) = (exported.parent / "found").rglob("samples_capitals_*.jsonl")
    (results,) = (exported.parent / "found").rglob("results_*.json")
    scored_samples = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    expected = answers(exported)
    for sample, numbers in zip(scored_samples, expected, strict=True):
        assert [float(number) for number, _ in sample["filtered_resps"]] == pytest.approx(numbers, abs=1e-4)
    right = sum(
        numbers.index(max(numbers)) == question["answer"] for numbers, question in zip(expected, QUESTIONS, strict=True)
    )
    assert json.loads(results.read_text())["results"]["capitals"]["acc,none"] == right / len(QUESTIONS)
