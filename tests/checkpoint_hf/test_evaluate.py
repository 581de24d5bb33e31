"""docs/evaluate.md: an exported model answers the page's questions, by transformers and by lm-evaluation-harness."""

from __future__ import annotations

import json
import re
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
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


QUESTIONS = [json.loads(line) for line in block("json").splitlines()]


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that titanmoe has written, and a tokenizer of the words that occur."""
    monkeypatch.chdir(tmp_path)
    words = {word for one in QUESTIONS for word in [*one["question"].split(), *one["choices"]]}
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
    found = []
    for one in QUESTIONS:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(one["question"])])).logits[0, -1]
        choices = torch.tensor([tokenizer.encode(choice) for choice in one["choices"]])
        assert choices.shape == (3, 1) and (choices > 2).all()
        found.append(logits.log_softmax(-1)[choices[:, 0]].tolist())
    return found


def test_an_export_has_what_an_evaluation_needs(exported: Path) -> None:
    assert all(-20 < number < 0 for choices in answers(exported) for number in choices)


def test_the_harness_finds_the_same_answers(exported: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={exported},dtype=float32",
        tasks=["capitals"],
        task_manager=TaskManager(include_path="tasks", include_defaults=False),
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )
    want = answers(exported)
    samples = sorted(found["samples"]["capitals"], key=lambda sample: sample["doc_id"])
    for sample, numbers in zip(samples, want, strict=True):
        assert [float(number) for number, _ in sample["filtered_resps"]] == pytest.approx(numbers, abs=1e-4)
    right = sum(numbers.index(max(numbers)) == one["answer"] for numbers, one in zip(want, QUESTIONS, strict=True))
    assert found["results"]["capitals"]["acc,none"] == right / len(QUESTIONS)
