"""Questions that are answered during training: as the plain model does, and a run without them is the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import parity, reference, world
from tests.train.test_validation import MAPPINGS, recipe, trained
from titanmoe.config import ConfigError
from titanmoe.data.batch import Batch
from titanmoe.data.quiz import Question, QuizSet, encode_choices
from titanmoe.data.token_shards import StoredTokenizer
from titanmoe.data.tokenizer import ByteTokenizer
from titanmoe.report.read_run import read_runs
from titanmoe.tokens import IGNORE
from titanmoe.train.evaluation import score_question

QUESTIONS = [
    {"question": "a", "choices": ["b", "cde"], "answer": 1},
    {"question": "one  ", "choices": ["é", "ab", "x y"], "answer": 0},
    {"question": "", "choices": ["no", "yes"], "answer": 1},
] + [{"question": "q" * n, "choices": ["z", "zz"], "answer": n % 2} for n in range(1, 10)]


def few_texts(folder: Path) -> Path:
    for i in range(8):
        (folder / f"{i}.txt").write_text("black quartz " * (1 + 5 * (i % 3)))
    return folder


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("questions") / "few.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n")
    texts = few_texts(tmp_path_factory.mktemp("texts"))
    return recipe(texts, **{"validation.quiz.paths": [str(file)], "validation.quiz.interval": 2})


def by_plain_model(config: Any) -> list[np.ndarray]:
    """Of each question, the log-probability of each choice, one at a time: begin mark, question, space and choice."""
    weights, bias = reference.initial_weights(config.model, 0, torch.float64), reference.initial_bias(config.model)
    found = []
    for question in QUESTIONS:
        found.append(np.zeros(len(question["choices"])))
        for number, choice in enumerate(question["choices"]):
            context = question["question"].rstrip()
            text = (question["question"] + " " + choice).encode()
            row = torch.tensor([256, *text])
            labels = row[1:].clone()
            labels[: len(context.encode())] = IGNORE
            batch = Batch(row[None, :-1], labels[None], torch.ones(1, len(labels), dtype=torch.bool))
            logits_GSV, _, _ = reference.forward(config, weights, reference.Tokens.of([[batch]]), bias)
            log_p_SV = logits_GSV[0].log_softmax(-1)
            found[-1][number] = sum(float(log_p_SV[s, id]) for s, id in enumerate(labels.tolist()) if id != IGNORE)
    return found


def answered(changes: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    trainer = parity.make_trainer(changes)
    quiz = trainer.training.quiz
    assert quiz.after_step().keys() >= {"quiz.few.margin"}  # before the first step, too
    trainer.train_step()
    assert quiz.after_step() == {}
    trainer.train_step()
    trainer.training.loader.close()
    return quiz.after_step(), quiz.log_probabilities().tolist()


@pytest.mark.parametrize("mapping", ["dp2 tp2", "cp2 pp2"])
def test_answers_are_those_of_the_plain_model_under_every_mapping(asked: dict[str, Any], mapping: str) -> None:
    """With optimizer.lr = 0 the weights stay the initial ones. The rows fill several batches, the last with padding."""
    layers = {"model.num_layers": 2, "training.global_batch_size": 4, "optimizer.lr": 1e-300, "training.seq_len": 32}
    changes = asked | layers
    report, log_p = world.run(4, answered, changes | MAPPINGS[mapping])[0]
    config = parity.read(changes, 1)
    rows = len(QuizSet(config, 0, 1, None).sequences)
    assert rows > 4 and rows % 4
    want = by_plain_model(config)
    assert log_p == pytest.approx(np.concatenate(want).tolist(), rel=1e-10)
    right = [question["answer"] for question in QUESTIONS]
    best = [int(x.argmax()) for x in want]
    (line,) = report["quiz"]
    assert line["accuracy"] == [float(a == b) for a, b in zip(best, right, strict=True)]
    assert report["quiz.few.accuracy"] == pytest.approx(np.mean(line["accuracy"]))
    margin = [x[a] - max(y for i, y in enumerate(x) if i != a) for x, a in zip(want, right, strict=True)]
    assert line["margin"] == pytest.approx(margin, rel=1e-9)
    sizes = [len(question["choices"][a].encode()) for question, a in zip(QUESTIONS, right, strict=True)]
    bits = [-x[a] / n * math.log2(math.e) for x, a, n in zip(want, right, sizes, strict=True)]
    assert report["quiz.few.bits_per_byte"] == pytest.approx(np.mean(bits), rel=1e-10)


def answered_cold(changes: dict[str, Any], cold: bool) -> list[float]:
    """cold: as on GPUs, where the first run of a pipeline loads its kernels."""
    trainer = parity.make_trainer(changes)
    trainer.training.gradients.engine.cold = cold
    return trainer.training.quiz.log_probabilities().tolist()


def test_kernels_that_are_loaded_first_change_no_answer(asked: dict[str, Any]) -> None:
    changes = asked | {"parallelism.pp": 2, "pipeline.schedule": "1F1B", "training.seq_len": 32}
    cold, warm = (world.run(2, answered_cold, changes, cold)[0] for cold in (True, False))
    assert cold == warm


@pytest.mark.parametrize(
    "mapping", [{"parallelism.tp": 2}, {"parallelism.pp": 2, "pipeline.schedule": "1F1B"}], ids=["tp", "pp"]
)
def test_a_run_with_answers_is_one_without(asked: dict[str, Any], mapping: dict[str, Any]) -> None:
    """Bit-equal, including everything that a forward might leave behind."""
    changes = asked | mapping | {"moe.bias_update_rate": 0.05, "moe.jitter": 0.1, "training.seq_len": 32}
    changes |= {"model.mtp_depth": 1, "training.deterministic": True, "training.global_batch_size": 4}
    without = {"validation.quiz.paths": [], "validation.quiz.interval": 0}
    plain = world.run(2, trained, changes | without, 3)[0]
    beside = world.run(2, trained_with_answers, changes, 3)[0]
    for name in ("loss", "norm"):
        assert plain[name] == beside[name]
    for name in ("weights", "bias"):
        assert plain[name].keys() == beside[name].keys()
        assert all(torch.equal(plain[name][key], beside[name][key]) for key in plain[name])


def trained_with_answers(changes: dict[str, Any], steps: int) -> dict[str, Any]:
    make_trainer = parity.make_trainer

    def answering(*args: Any, **kwargs: Any) -> Any:
        trainer = make_trainer(*args, **kwargs)
        trainer.training.validation = trainer.training.quiz
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "make_trainer", answering)
        reported = trained(changes, steps)
    assert [bool(report) for report in reported["validation"]] == [False, True, False]
    return reported


def test_a_run_writes_what_its_report_reads(asked: dict[str, Any], tmp_path: Path) -> None:
    changes = parity.TINY | asked | {"job.dump_folder": str(tmp_path), "job.name": "run", "metrics.console": "lines"}
    changes |= {"training.seq_len": 32, "training.global_batch_size": 4, "training.steps": 3}
    world.run(1, parity.train, parity.arguments(changes))
    (run,) = read_runs([tmp_path / "run"])
    steps, means = run.series("quiz.few.margin")
    assert steps == list(run.quiz["few"]) == [2, 3] and not run.warnings
    assert means == pytest.approx([line["margin"].mean() for line in run.quiz["few"].values()])
    assert len(run.quiz["few"][2]["accuracy"]) == len(QUESTIONS)


def test_length_decides_between_choices_where_the_harness_says_so() -> None:
    """acc takes the most probable choice, acc_norm the most probable per character."""
    judged = score_question(Question("", ["yes", "é" * 6], 1, 1), np.array([-2.0, -3.0]))
    assert (judged["accuracy"], judged["accuracy_norm"], judged["margin"]) == (0, 1, -1)
    assert judged["bits_per_byte"] == pytest.approx(3 / math.log(2) / 12)


def test_spaces_at_the_end_of_a_question_belong_to_the_choice() -> None:
    (one,) = encode_choices(ByteTokenizer(), [("ab  ", " c")])
    assert one.ids == [256, *b"ab   c"] and one.labels == 4


def test_bad_questions_are_refused_all_at_once(asked: dict[str, Any], tmp_path: Path) -> None:
    bad = [
        {"question": "q", "choices": ["a", "b"]},
        {"question": "q", "choices": ["a", "b"], "answer": 2},
        {"question": "q", "choices": ["a"], "answer": 0},
        {"choices": ["a", "b"], "answer": 0},
    ]
    (tmp_path / "bad.jsonl").write_text("\n".join([*map(json.dumps, bad), "[1", "7", "8"]))
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "q" * 99, "choices": ["a", "b"], "answer": 0}))
    (tmp_path / "none.jsonl").write_text("")
    paths = [str(tmp_path / name) for name in ("bad.jsonl", "missing.jsonl", "long.jsonl", "none.jsonl")]
    config = parity.read(asked | {"validation.quiz.paths": paths}, 1)
    with pytest.raises(ConfigError) as refused:
        QuizSet(config, 0, 1, None)
    ends = [
        'bad.jsonl:1: has choices but no "answer": give the number of the right one, counted from 0',
        'bad.jsonl:2: "answer" is 2, and the 2 choices have the numbers 0 to 1',
        'bad.jsonl:3: needs "choices", a list of two texts or more, none of them empty',
        'bad.jsonl:4: has no "question", or none that is a text: write "question": "..."',
        "bad.jsonl:5: ",
        "bad.jsonl: 2 more lines like these",
        "missing.jsonl cannot be read: No such file or directory: check the path",
        "long.jsonl has a question and choice of 101 tokens, more than training.seq_len = 16: shorten it, or raise",
        "none.jsonl has no questions: ",
    ]
    assert len(refused.value.problems) == len(ends)
    assert all(end in problem for end, problem in zip(ends, refused.value.problems, strict=True))


def test_a_tokenizer_that_did_not_make_the_training_data_is_refused(asked: dict[str, Any]) -> None:
    stored = StoredTokenizer("another", Path("shards/tokenizer"), {})
    with pytest.raises(
        ConfigError, match=r"shards was made with the tokenizer another, which is not beside its shards"
    ):
        QuizSet(parity.read(asked, 1), 0, 1, stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation.quiz.paths": ["a.jsonl"]}, r"interval = 0 never reads it: set interval, such as 100"),
        ({"validation.quiz.interval": 3}, r"interval = 3 has no questions: name validation\.quiz\.paths"),
        (
            {"validation.quiz.paths": ["x/a.jsonl", "y/a.jsonl"], "validation.quiz.interval": 3},
            r"several files called a, and results are reported by that name: rename all but one",
        ),
        (
            {"validation.quiz.paths": ["a"], "validation.quiz.interval": 3, "data.source": "synthetic"},
            r'data\.source = "synthetic" has no tokenizer to read them with',
        ),
    ],
)
def test_what_contradicts_questions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parity.read(changes, 1)
