"""`titanmoe score`: what its ranks get; tests/test_fine_tuning.py starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titanmoe.cli import main
from titanmoe.launcher import score_command


@pytest.mark.parametrize("data", [["--data", "a.jsonl"], ["--data=a.jsonl"]], ids=" ".join)
def test_its_ranks_get_other_data_and_write_to_no_run(
    data: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text('{"text": "a"}\n')
    started: list[Any] = []
    monkeypatch.setattr(score_command, "start", lambda prepared: started.append(prepared) or 0)
    words = [*data, "b.jsonl", "--training.seq_len", "512", "--data.weights", "1", "2"]
    assert main(["score", "debug", *words]) == 0
    (prepared,) = started
    config = prepared.checked.config
    assert prepared.checked.scores and not config.checkpoint.enable and config.training.seq_len == 512
    assert (config.data.source, config.data.paths, config.data.weights) == ("files", ["a.jsonl", "b.jsonl"], [])


@pytest.mark.parametrize(
    ("words", "says"),
    [(["debug", "--data"], "--data is empty: give token shards"), ([], "command line: which recipe?")],
)
def test_what_it_refuses(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", *words]) == 2
    assert says in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "--help"]) == 0
    assert "usage: titanmoe score RECIPE.toml [--data PATH ...]" in capsys.readouterr().out
