"""`titanmoe rehearse` on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.rehearse import many_ranks
from titanmoe.rehearse.rehearsal import recipe_to_rehearse
from titanmoe.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
DEBUG = str(ROOT / "train_configs" / "debug.toml")
SMALL = ["--model.num_layers", "1", "--training.global_batch_size", "8", "--training.seq_len", "64"]
SMALL += ["--training.mixed_precision_param", "bfloat16"]


def rehearse(*argv: str, config: str = DEBUG) -> int:
    return main(["rehearse", "--config", config, *argv])


def refused(capsys: pytest.CaptureFixture, *argv: str, config: str = DEBUG) -> str:
    assert rehearse(*argv, config=config) == 2
    out = capsys.readouterr()
    assert out.out == "" and "Traceback" not in out.err
    return out.err


def test_a_table_and_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "rank.json"
    skipped = ["--data.skip_steps", "1"]  # does not concern a rehearsal, which would find an empty step
    assert rehearse("--ranks", "4", "--rank", "3", "--json", str(file), *SMALL, *skipped) == 0
    text = capsys.readouterr().out
    (report,) = json.loads(file.read_text())["ranks"]
    assert (report["rank"], report["world"], report["hardware"]) == (3, 4, "h100")
    rows = [
        row
        for row in report["messages"]
        if (row["communicator"], row["dtype"], row["pass"]) == ("dispatch", "bfloat16", "forward")
    ]
    tokens = 4 * 64 // 2  # samples, positions over tp
    assert {row["count"] for row in rows} == {1}  # a microbatch and a layer: there, and back
    back = tokens * 2 * 64 * 2  # top-k, width, bytes
    assert [row["sent_bytes"] for row in rows] == [back + tokens * 2 * 16, back]  # there with their weights
    assert [row["by_layer"] for row in rows] == [{"layers.0": 1}] * 2
    assert all(row["line"] in text for row in report["messages"])
    assert "moe/dispatchers/alltoall.py" in "".join(report["syncs"])
    assert f"One step computes: {report['work']['kernels']:,} kernels" in text
    assert any(row["op"] == "mm" and set(row["by_layer"]) == {"layers.0"} for row in report["work"]["operations"])
    assert report["bytes"]["optimizer"] > 2 * report["bytes"]["parameters"] > 0


def test_every_rank_and_the_order(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "order.json"
    stages = ["--parallelism.pp", "2", "--parallelism.tp", "1", "--parallelism.experts.ep", "2"]
    stages += ["--model.num_layers", "2", "--training.global_batch_size", "16"]
    assert rehearse("--ranks", "4", "--all-roles", "--json", str(file), *SMALL, *stages) == 0
    text = capsys.readouterr().out
    assert "Order of messages: safe in host order" in text
    assert "4 ranks, as on h100, routing balanced: all of them" in text
    report = json.loads(file.read_text())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3] and report["order"]["safe"]
    worst = max(report["ranks"], key=lambda rank: rank["memory"]["peak"])
    assert f"Rank {worst['rank']} needs the most memory." in text and worst["memory"]["line"] in text
    assert rehearse("--ranks", "2", "--all-ranks", *SMALL, "--parallelism.experts.ep", "2") == 0
    text = capsys.readouterr().out
    assert "All of them need the same memory." in text
    assert "This does not see:\n    any step but step 1 (--steps)\n    saving, validation, " in text
    assert rehearse("--ranks", "16", "--all-roles", *SMALL, "--training.global_batch_size", "32") == 0
    text = capsys.readouterr().out
    corners = int(re.search(r"(\d+) of them, the others are taken to be alike", text)[1])
    assert f"    faults of the {16 - corners} ranks that were not rehearsed (--all-ranks)" in text


def test_a_later_step(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second clips, and a rank has a message too many in it."""

    def messages(steps: int) -> list[dict]:
        clips = ["--optimizer.qk_clip", "100", "--optimizer.qk_clip_every", "2", "--model.qk_norm", "none"]
        words = ["--ranks", "2", "--steps", str(steps), "--json", str(tmp_path / "rank.json")]
        assert rehearse(*words, *SMALL, "--parallelism.tp", "1", "--parallelism.experts.ep", "2", *clips) == 0
        (report,) = json.loads((tmp_path / "rank.json").read_text())["ranks"]
        assert report["step"] == steps
        return report["messages"]

    first, second = messages(1), messages(2)
    assert "routing balanced, step 2" in capsys.readouterr().out
    assert sum(row["count"] for row in second) > sum(row["count"] for row in first)

    def one_more(trainer: Trainer) -> dict:
        report = train_step(trainer)
        if trainer.training.runtime.rank == 1 and trainer.step == 2:
            dist.all_reduce(torch.zeros(1))
        return report

    train_step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", one_more)
    two = ["--ranks", "2", "--all-ranks", *SMALL, "--parallelism.tp", "1", "--parallelism.experts.ep", "2"]
    assert rehearse(*two) == 0 and rehearse(*two, "--steps", "2") == 1


def test_eight_ranks_are_rehearsed_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_ranks, "usable_cores", lambda: 2)
    assert 8 // many_ranks.MIN_RANKS_PER_PROCESS >= 2
    assert rehearse("--ranks", "8", "--all-ranks", *SMALL, "--training.global_batch_size", "16") == 0


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert "--hardware = h1000 is unknown: use a100, h100, h200" in refused(
        capsys, "--ranks", "4", "--hardware", "h1000"
    )
    with pytest.raises(ConfigError, match="hardware 'gb200' cannot be rehearsed: use a100, h100, h200, b200, cpu"):
        recipe_to_rehearse(["debug"], 4, "gb200")  # which the planner knows
    assert "--rank = 4 is not in a world of 4 ranks: use 0 to 3" in refused(capsys, "--ranks", "4", "--rank", "4")
    assert "name a GPU" in refused(capsys, "--ranks", "4", "--all-roles", "--hardware", "cpu")
    assert "--all-ranks checks" in refused(capsys, "--ranks", "4", "--all-ranks", "--hardware", "cpu")
    assert "--steps = 0 is not a number of steps" in refused(capsys, "--ranks", "4", "--steps", "0")
    assert "--imbalance = 0.5 is below 1" in refused(capsys, "--ranks", "4", "--imbalance", "0.5")
    assert "the busiest expert has 4 times the mean: use at most that" in refused(
        capsys, "--ranks", "4", "--imbalance", "4.5"
    )
    assert "3 % 2 = 1: use tp in 1, 3" in refused(capsys, "--ranks", "3")  # the laws' own
    assert "no.toml" in refused(capsys, "--ranks", "4", config=str(tmp_path / "no.toml"))
    assert "training.stps" in refused(capsys, "--ranks", "4", "--training.stps", "3")
    assert "cannot write" in _said(capsys, tmp_path)


def _said(capsys: pytest.CaptureFixture, folder: Path) -> str:
    assert rehearse("--ranks", "4", "--json", str(folder / "none" / "x.json"), *SMALL) == 2
    return capsys.readouterr().err


def test_other_commands_still_refuse_what_they_do_not_know(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["report", "runs", "--training.steps", "3"])
    assert "unrecognized arguments: --training.steps 3" in capsys.readouterr().err
