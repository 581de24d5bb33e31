"""docs/generate.md: an exported model answers the page's questions, by transformers and by lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests import parity, world
from tests.checkpoint_hf import models
from titanmoe.cli import main
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import build_meshes

PAGE = (Path(__file__).parents[2] / "docs" / "generate.md").read_text()


def block(language: str) -> str:
    match = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert match
    return match[1]


QUESTIONS = [json.loads(line) for line in block("json").splitlines()]
LONGER = [
    {"question": "Paris Rome ", "choices": ["is Norway", "Oslo", "of The capital is"], "answer": 2},
    {"question": "", "choices": ["The capital", "of"], "answer": 0},
]


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


def of_pairs(exported: Path, questions: list[dict]) -> list[float]:
    """The log-likelihood of every choice, as lm-evaluation-harness 0.4.13 has it (TemplateLM._encode_pair, HFLM)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    likelihoods = []
    for question in questions:
        for choice in question["choices"]:
            context, continuation = question["question"], " " + choice
            if context == "":
                tokens = [tokenizer.eos_token_id, *(rest := tokenizer.encode(continuation))]
            else:
                spaces = len(context) - len(context.rstrip())
                if spaces:
                    continuation, context = context[-spaces:] + continuation, context[:-spaces]
                tokens = tokenizer.encode(context + continuation)
                rest = tokens[len(tokenizer.encode(context)) :]
            with torch.no_grad():
                log_p = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            likelihoods.append(sum(float(log_p[i - len(rest) - 1, id]) for i, id in enumerate(rest)))
    return likelihoods


def scored_in_a_run(argv: list[str]) -> list[float]:
    """On a rank: before its first step."""
    from titanmoe.components import COMPONENTS
    from titanmoe.train.launch import read_config

    runtime = parity.runtime_here()
    config = read_config(argv, runtime.world, COMPONENTS)
    training = parity.build_trainer(config, runtime, garbage=parity.no_collection).training
    with training.checkpoints.in_folder(Path(config.job.dump_folder) / "run") as checkpoints:
        checkpoints.begin()
        scored = training.quiz.log_probabilities().tolist()
    training.loader.close()
    return scored


def by_a_run(exported: Path, questions: list[dict]) -> list[float]:
    """That begins with the exported weights and their tokenizer, folded over two ranks."""
    folder = exported.parent
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("The capital of France is Paris " * 9)
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, questions)))
    words = {"model.hf": exported, "data.source": "files", "data.paths": folder / "text", "training.seq_len": 16}
    words |= {"validation.quiz.paths": folder / "asked.jsonl", "validation.quiz.interval": 1}
    words |= {"training.mixed_precision_param": "float32", "parallelism.tp": 2, "job.dump_folder": folder / "runs"}
    argv = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return world.run(2, scored_in_a_run, argv)[0]


def test_a_run_scores_questions_as_the_harness_does(exported: Path) -> None:
    asked = [*QUESTIONS, *LONGER]
    assert by_a_run(exported, asked) == pytest.approx(of_pairs(exported, asked), abs=1e-5)


# ---- titanmoe eval


STUBS = ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.model")
"""Modules of the package that titanmoe.generate.harness imports: it only inherits from LM, which is abstract."""


def by_the_command_s_model(folder: Path, degrees: dict[str, int], requests: dict[str, list[tuple]]) -> dict[str, list]:
    """On a rank: what the LM of `titanmoe eval` replies to requests, by method. Does not need the package."""
    from titanmoe.generate.build_model import build
    from titanmoe.generate.log_likelihood import Scorer
    from titanmoe.generate.loop import Generator
    from titanmoe.generate.model import config_to_run, find_model, tokenizer_of

    modules = {name: mock.MagicMock() for name in STUBS if find_spec("lm_eval") is None}
    if modules:
        modules["lm_eval.api.model"].LM = object
    with mock.patch.dict(sys.modules, modules):
        from titanmoe.generate.harness import RunModel
    runtime, trained = parity.runtime_here(), find_model(folder)
    tokenizer, one = tokenizer_of(trained, None), {"pp": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1}
    config = config_to_run(trained.config, runtime.world, one | degrees, "float32", "cpu")
    meshes = build_meshes(derive(runtime.world, config.parallelism), "cpu", trains=False)
    model = build(config, meshes, trained, runtime.device)
    generator = Generator(model, meshes, runtime.device, tokenizer.vocab_size, {tokenizer.eos})
    scorer = Scorer(generator, requests.pop("length", trained.config.training.seq_len))
    lm = RunModel(scorer, tokenizer, 2)
    return {name: getattr(lm, name)([SimpleNamespace(args=x) for x in some]) for name, some in requests.items()}


@pytest.mark.parametrize(("ranks", "degrees"), [(1, {}), (4, {"tp": 2, "ep": 4})])
def test_the_command_s_model_replies_as_transformers_does(exported: Path, ranks: int, degrees: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    asked = [*QUESTIONS, *LONGER]
    pairs = [(question["question"], " " + choice) for question in asked for choice in question["choices"]]
    texts = [("Paris Rome is Norway Oslo of The capital is",), ("Oslo",)]
    options = {"until": ["Rome", "Oslo"], "max_gen_toks": 12, "do_sample": False}
    contexts = [(text, options) for text in ("The capital of", "Paris", "is of Norway")]
    contexts.append(("Rome", {"max_gen_toks": 5}))
    requests = {"loglikelihood": pairs, "loglikelihood_rolling": texts, "generate_until": contexts}
    got = world.run(ranks, by_the_command_s_model, exported, degrees, requests)
    assert all(other == got[0] for other in got)
    assert [log_p for log_p, _ in got[0]["loglikelihood"]] == pytest.approx(of_pairs(exported, asked), abs=1e-5)
    assert {is_greedy for _, is_greedy in got[0]["loglikelihood"]} == {True, False}
    of_texts = of_pairs(exported, [{"question": "", "choices": [text]} for (text,) in texts])
    assert got[0]["loglikelihood_rolling"] == pytest.approx(of_texts, abs=1e-5)
    for (context, options), text in zip(contexts, got[0]["generate_until"], strict=True):
        ids = tokenizer.encode(context)
        limit = {"max_new_tokens": options["max_gen_toks"], "do_sample": False, "pad_token_id": 0}
        unknown = list(range(len(tokenizer), model.config.vocab_size))  # ids that titanmoe never generates
        with torch.no_grad():
            made = model.generate(torch.tensor([ids]), suppress_tokens=unknown, **limit)
        whole = tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)
        for stop in options.get("until", ()):
            whole = whole.partition(stop)[0]
        assert text.split() == whole.split()


def test_long_texts_are_cut_to_what_the_model_reads(exported: Path) -> None:
    """A continuation keeps what fits of its context, and a text is scored in windows."""
    context, text = "Paris Rome is Norway Oslo of", "The capital is Oslo of Norway"
    requests = {"length": 4, "loglikelihood": [(context, " Paris Rome")], "loglikelihood_rolling": [(text,)]}
    ((replies),) = world.run(1, by_the_command_s_model, exported, {}, requests)
    cut = {"question": "Norway Oslo of", "choices": ["Paris Rome"]}
    assert replies["loglikelihood"][0][0] == pytest.approx(sum(of_pairs(exported, [cut])), abs=1e-5)
    first = of_pairs(exported, [{"question": "", "choices": ["The capital is Oslo"]}])
    rest = of_pairs(exported, [{"question": "capital is Oslo", "choices": ["of Norway"]}])
    assert replies["loglikelihood_rolling"][0] == pytest.approx(first[0] + rest[0], abs=1e-5)


def test_without_the_package_the_command_says_how_to_get_it(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("titanmoe.generate.eval_command.find_spec", return_value=None):
        assert main(["eval", str(exported), "--tasks", "capitals"]) == 2
    assert 'pip install "titanmoe[eval]"' in capsys.readouterr().err


def test_the_command_runs_tasks_on_a_checkpoint(exported: Path) -> None:
    """Run the page's commands on a small checkpoint, and check what they refuse."""
    pytest.importorskip("lm_eval")
    (command,) = re.findall(r"^\$ titanmoe eval (.* --include-path .*)$", PAGE, re.MULTILINE)
    words = [str(exported) if word == "runs/my_run" else word for word in shlex.split(command)]
    words += ["--dtype", "float32", "--output", "found.json"]

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "titanmoe", "eval", *words],
            cwd=exported.parent,
            env=os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    assert "|capitals|" in run(*words)
    results = json.loads((exported.parent / "found.json").read_text())
    samples = sorted(results["samples"]["capitals"], key=lambda sample: sample["doc_id"])
    for sample, numbers in zip(samples, answers(exported), strict=True):
        assert [float(number) for number, _ in sample["filtered_resps"]] == pytest.approx(numbers, abs=1e-4)
    assert "--tasks capital: there is no such task" in run(
        str(exported), "--tasks", "capital", "--include-path", "tasks", code=2
    )
    assert "--limit = 0 is below 1" in run(str(exported), "--tasks", "capitals", "--limit", "0", code=2)


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
    of_harness = [float(number) for sample in scored_samples for number, _ in sample["filtered_resps"]]
    assert by_a_run(exported, QUESTIONS) == pytest.approx(of_harness, abs=1e-5)
    for sample, numbers in zip(scored_samples, expected, strict=True):
        assert [float(number) for number, _ in sample["filtered_resps"]] == pytest.approx(numbers, abs=1e-4)
    right = sum(
        numbers.index(max(numbers)) == question["answer"] for numbers, question in zip(expected, QUESTIONS, strict=True)
    )
    assert json.loads(results.read_text())["results"]["capitals"]["acc,none"] == right / len(QUESTIONS)
