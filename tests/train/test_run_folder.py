"""Which folder a run writes to, and what happens to the lines of steps that run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import pytest

from tests.support import processes
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.train import run_folder
from titanmoe.train.run_folder import COMMAND, EVENTS, EXPERTS, METRICS, QUIZ, rewind, typed_command


def claim(config: Config) -> tuple[Path, TextIO | None]:
    return run_folder.claim_folder(config.job, config.checkpoint)


@pytest.fixture
def config(tmp_path) -> Config:
    config = Config()
    config.job.dump_folder, config.job.name, config.checkpoint.enable = str(tmp_path), "run", False
    return config


@pytest.mark.parametrize("given", ["--training.steps 10", "--training.steps=10"])
def test_a_command_without_an_option_has_room_for_its_new_value(given: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(COMMAND, f"titanmoe train debug {given} --job.name 'a b'")
    assert typed_command("--training.steps") == "titanmoe train debug --job.name 'a b'"
    assert typed_command() == f"titanmoe train debug {given} --job.name 'a b'"


def test_a_run_that_does_not_save_has_a_folder_of_its_own_each_time(config):
    folders = [claim(config)[0] for _ in range(3)]
    assert [folder.name for folder in folders] == ["run", "run-2", "run-3"]
    (folders[0] / METRICS).unlink()
    assert claim(config)[0] == folders[0]


def test_so_does_a_run_that_saves_but_must_start_fresh(config):
    config.checkpoint.enable, config.checkpoint.load = True, "none"
    assert [claim(config)[0].name for _ in range(2)] == ["run", "run-2"]


def test_a_run_that_continues_has_one_folder_and_locks_it(config, tmp_path):
    config.checkpoint.enable = True
    folder, lock = claim(config)
    assert folder == tmp_path / "run"
    with pytest.raises(ConfigError, match=r"a run is alive in .*run \(process"):
        claim(config)
    lock.close()
    assert claim(config)[0] == folder


def test_a_lock_dies_with_its_process(config, tmp_path):
    config.checkpoint.enable = True
    code = (
        "import os, signal; from titanmoe.config.schema import Config;"
        "from titanmoe.train.run_folder import claim_folder; c = Config();"
        f"c.job.dump_folder, c.job.name, c.checkpoint.enable = {str(tmp_path)!r}, 'run', True; "
        "kept = claim_folder(c.job, c.checkpoint);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert processes.run(["-c", code]).returncode == -9
    assert claim(config)[0] == tmp_path / "run"


def test_a_folder_that_cannot_be_made_is_one_line(config, tmp_path):
    (tmp_path / "file").write_text("")
    config.job.dump_folder = str(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"job.dump_folder: cannot write to .*file/run: .*: name another folder"):
        claim(config)


def test_steps_that_will_be_made_again_are_forgotten(tmp_path):
    lines = [json.dumps({"step": step}) for step in (1, 2, 3, 4)]
    (tmp_path / METRICS).write_text("\n".join(lines) + '\n{"step": 5, "lo')  # the last line is cut off by a kill
    rewind(tmp_path, 3)
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2, 3]


def test_a_fresh_run_in_an_old_folder_moves_the_old_lines_aside(tmp_path):
    for n in (1, 2):
        (tmp_path / METRICS).write_text(f'{{"step": {n}}}\n')
        rewind(tmp_path, 0)
        assert not (tmp_path / METRICS).exists()
        assert (tmp_path / f"metrics-{n}.jsonl").read_text() == f'{{"step": {n}}}\n'
    rewind(tmp_path, 0)
    assert not (tmp_path / "metrics-3.jsonl").exists()


def test_loads_are_rewound_like_metrics_and_of_events_only_spikes(tmp_path):
    (tmp_path / METRICS).write_text('{"step": 1}\n{"step": 4}\n')
    (tmp_path / EXPERTS).write_text('{"step":1,"load":{}}\n{"step":4,"load":{}}\n')
    events = [(0, "start"), (2, "spike"), (3, "save"), (4, "spike"), (4, "save"), (3, "restart")]
    lines = [json.dumps({"step": step, "kind": kind}) for step, kind in events]
    (tmp_path / EVENTS).write_text("\n".join(lines) + '\n{"step": 4, "ki')
    rewind(tmp_path, 3)
    left = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in left] == [e for e in events if e != (4, "spike")]
    assert (tmp_path / EXPERTS).read_text() == '{"step":1,"load":{}}\n'
    assert (tmp_path / METRICS).read_text() == '{"step": 1}\n'


def test_they_are_moved_aside_together(tmp_path):
    for name in (METRICS, EXPERTS, QUIZ, EVENTS):
        (tmp_path / name).write_text('{"step": 7, "kind": "start"}\n')
    rewind(tmp_path, 0)
    names = ["events-1.jsonl", "experts-1.jsonl", "metrics-1.jsonl", "quiz-1.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
