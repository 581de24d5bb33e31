"""checkpoint.keep_best and training.stop_after: what is kept, when a run ends, and that a resumed run does the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import parity, world
from tests.checkpoint.runs import RUN
from titanmoe import observe
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_command import latest_checkpoint
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.train.best import BestStep, higher_is_better
from titanmoe.train.evaluation import Validation

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.4, 10: 1.9}
VALIDATED = {
    "validation.interval": 2,
    "validation.steps": 1,
    "validation.held_out": 4,
    "checkpoint.interval": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": "val_loss",
    "optimizer.lr": 1e-3,
    "lr_schedule.decay": "none",
}


def train(folder: str, changes: dict[str, Any]) -> tuple[int, str]:
    """Train with these validation losses; return the last step, and what rank 0 prints."""
    trainer, said = parity.make_trainer(RUN | VALIDATED | {"job.dump_folder": folder} | changes), []
    with (
        mock.patch.object(Validation, "measure", lambda self: (LOSSES.get(trainer.step, 9.0), {})),
        mock.patch("titanmoe.train.trainer.print_rank_0", said.append),
        mock.patch("titanmoe.train.checkpoints.print_rank_0", said.append),
    ):
        trainer.train()
    return trainer.step, "\n".join(said)


def steps_in(folder: Path) -> list[int]:
    return list(layout.checkpoints_by_step(folder / "run/checkpoints"))


def test_the_best_is_kept_beside_the_last_and_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ((_, said),) = world.run(1, train, str(tmp_path), {"training.steps": 9})
    assert steps_in(tmp_path) == [4, 9] and "step-00000004: val_loss 2.0000 at step 4" in said
    best = latest_checkpoint(tmp_path / "run:best")
    assert best.name == "step-00000004" and latest_checkpoint(tmp_path / "run").name == "step-00000009"
    assert latest_checkpoint(tmp_path / "run/checkpoints:best") == best
    assert latest_checkpoint(tmp_path / "run:4") == best
    with pytest.raises(CheckpointError, match=r"run has no checkpoint of step 5: titanmoe checkpoint ls"):
        latest_checkpoint(tmp_path / "run:5")
    capfd.readouterr()
    assert main(["checkpoint", "ls", str(tmp_path / "run")]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert [line.split()[-1] for line in shown[1:]] == ["best", "latest"]
    assert main(["checkpoint", "inspect", "--no-norms", f"{tmp_path}/run:best"]) == 0
    assert "step-00000004" in capfd.readouterr().out

    world.run(1, train, str(tmp_path), {"training.steps": 11})
    assert steps_in(tmp_path) == [10, 11], "a better one came"
    world.run(1, train, str(tmp_path / "other"), {"checkpoint.load": f"{tmp_path}/run:best", "training.steps": 12})
    events = [json.loads(line) for line in (tmp_path / "other/run/events.jsonl").read_text().splitlines()]
    assert events[0]["text"] == "continues after step 10"


@pytest.mark.parametrize("interrupted", [0, 4, 6])
def test_a_run_without_gain_ends_and_one_that_resumes_ends_there_too(interrupted: int, tmp_path: Path) -> None:
    """Also under another mapping."""
    changes = {"training.steps": 20, "training.stop_after": 2}
    if interrupted:
        world.run(2, train, str(tmp_path), changes | {"training.steps": interrupted, "parallelism.tp": 2})
    ((last, said),) = world.run(1, train, str(tmp_path), changes)
    assert last == 8 and steps_in(tmp_path) == [4, 8]
    assert "stopped    2 evaluations (training.stop_after) have not improved on val_loss 2.0000 of step 4" in said
    ((last, said),) = world.run(1, train, str(tmp_path), changes)
    assert last == 8 and "nothing is left to do: 2 evaluations" in said and "--training.stop_after 4" in said
    changes |= {"training.stop_after": 4, "training.steps": 12}
    assert world.run(1, train, str(tmp_path), changes)[0][0] == 12


def test_a_run_without_a_best_says_how_to_keep_one(tmp_path: Path) -> None:
    world.run(1, train, str(tmp_path), {"training.steps": 2, "checkpoint.keep_best": ""})
    with pytest.raises(CheckpointError, match=r"run keeps no best checkpoint: train it with checkpoint\.keep_best"):
        latest_checkpoint(tmp_path / "run:best")


def test_accuracies_are_better_the_higher_and_absent_metrics_change_nothing() -> None:
    assert higher_is_better("quiz.task.accuracy_norm") and higher_is_better("preference.val_accuracy")
    assert not higher_is_better("val_loss") and not higher_is_better("quiz.task.bits_per_byte")
    best = BestStep("quiz.task.accuracy", True, 2)
    seen = []
    for step, report in enumerate(
        ({"quiz.task.accuracy": 0.5}, {}, {"quiz.task.accuracy": 0.4}, {}, {"quiz.task.accuracy": 0.6})
    ):
        best.after_step(step, report)
        seen.append((best.step, best.without_gain))
    assert seen == [(0, 0), (0, 0), (0, 1), (0, 1), (4, 0)] and not best.stops
    best.after_step(5, {"quiz.task.accuracy": float("nan")})
    best.after_step(6, {"quiz.task.accuracy": 0.6})
    assert best.stops and (best.step, best.value) == (4, 0.6)
    resumed = BestStep("quiz.task.accuracy", True, 2)
    resumed.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert resumed.state_dict() == best.state_dict() and resumed.stops
    other = BestStep("val_loss", True, 2)
    other.after_step(2, {"val_loss": float("nan")})
    assert (other.step, other.without_gain) == (-1, 1), "NaN is no best"
    first = other.state_dict()
    other.after_step(4, {"val_loss": 2.0})
    assert (other.step, other.without_gain) == (4, 0)
    other.load_state_dict(first)
    assert other.state_dict() == first, "the same process restores an earlier checkpoint"
    other.after_step(4, {"val_loss": float("nan")})
    assert other.stops and other.why_stopped() == "val_loss was NaN in 2 evaluations (training.stop_after)"
    other.load_state_dict(best.state_dict())
    assert other.state_dict() == BestStep("val_loss", True, 2).state_dict()


def test_only_the_evaluation_that_should_report_the_metric_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    monkeypatch.setattr(observe.active, "event", lambda *event: events.append(event), raising=False)
    best = BestStep("quiz.task.accuracy", True, 0)
    best.after_step(10, {"loss": 3.0, "val_loss": 2.0, "preference.val_accuracy": 0.5})
    best.after_step(11, {"loss": 3.0})
    assert not events
    best.after_step(20, {"val_loss": 2.0, "quiz.other.accuracy": 0.5})
    text = "checkpoint.keep_best: there is no metric quiz.task.accuracy; the evaluations report quiz.other.accuracy"
    assert events == [(20, "best", text)]


def test_a_skipped_batch_after_the_best_step_saves_nothing(tmp_path: Path) -> None:
    world.run(1, train, str(tmp_path), {"training.steps": 7, "checkpoint.keep_last": 0, "data.skip_steps": [5]})
    assert steps_in(tmp_path) == [2, 4, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation.interval": 0}, "which no validation reports while validation.interval = 0"),
        ({"checkpoint.keep_best": "loss"}, 'keep_best = "loss" is no metric of an evaluation: use val_loss'),
        ({"checkpoint.keep_best": "quiz.a.accuracy"}, "validation.quiz.paths is empty"),
        (
            {"checkpoint.keep_best": "quiz.a.acc", "validation.quiz.paths": ["b.jsonl"], "validation.quiz.interval": 2},
            "the metrics are quiz.b.bits_per_byte",
        ),
        ({"checkpoint.enable": False}, "checkpoint.enable = false saves none: set enable = true, or"),
        (
            {"checkpoint.keep_best": "", "training.stop_after": 2, "validation.interval": 0},
            "training.stop_after goes by val_loss",
        ),
    ],
)
def test_a_metric_that_no_evaluation_reports_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parity.read(RUN | VALIDATED | changes, 1)
    assert message in str(error.value)
