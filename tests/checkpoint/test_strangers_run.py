"""The folder of a stranger's run: no command runs its code, writes through its links or opens what they lead to."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import titanmoe
from tests import parity, reference
from tests.report.test_report import make_run
from titanmoe.checkpoint import layout, safe_files
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.choose_checkpoint import choose_start
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.cli import main
from titanmoe.components import COMPONENTS
from titanmoe.config.allowed_code import NAMING_FIELDS, VARIABLE
from titanmoe.config.fields import to_tables
from titanmoe.config.schema import Checkpoint
from titanmoe.launcher import agent
from titanmoe.train.run_folder import CONFIG, EVENTS, METRICS

# ---- code

PAYLOAD = "from pathlib import Path\nPath('ran').touch()\nclass X: pass\n"
FAMILY = "from titanmoe.models.families import family_of\nX = family_of('mixtral')\n"


@pytest.fixture
def stranger(tmp_path, monkeypatch) -> Path:
    """The folder of a run that was unpacked into the current folder, with a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "[]")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    run = make_run(tmp_path / "runs/stranger")
    (run / "payload.py").write_text(PAYLOAD)
    yield run
    for name in [name for name in sys.modules if name.startswith("runs")]:
        del sys.modules[name]


def value_of(field: str, name: str) -> Any:
    return [f"{name} 0.1"] if field == "moe.balance_losses" else name


def checkpoint_that_names(run: Path, field: str, name: str) -> Path:
    """A checkpoint of a model that could be used, whose record names code."""
    config = parity.read({"model.vocab_size": 320}, 1)
    path = run / "checkpoints" / layout.folder_name(7)
    tensors = {
        f"model.{key}": LazyTensor(tuple(x.shape), x.dtype, slice_of_full(lambda x=x: x))
        for key, x in (reference.initial_weights(config.model, 0) | reference.initial_bias(config.model)).items()
    }
    record = to_tables(config)
    table, _, key = field.partition(".")
    record[table][key] = value_of(field, name)
    write_checkpoint(path, tensors, {"step": 7, "config": record})
    layout.write_latest(path.parent, path.name)
    return path


def test_the_fields_that_name_components_are_those_of_the_tables() -> None:
    assert sorted(NAMING_FIELDS) == sorted(kind.field for kind in COMPONENTS.kinds)


@pytest.mark.parametrize("field", NAMING_FIELDS)
def test_report_runs_no_code_that_a_config_names(stranger, capsys, field) -> None:
    table, _, key = field.partition(".")
    name = "runs.stranger.payload:X"
    value = json.dumps(value_of(field, name))
    (stranger / CONFIG).write_text(f"[{table}]\n{key} = {value}\n")
    assert main(["report", str(stranger)]) == 0
    assert not Path("ran").exists() and "runs.stranger.payload" not in sys.modules and os.getcwd() not in sys.path
    assert f"{CONFIG} names code outside titanmoe" in (warning := capsys.readouterr().err)
    assert f'add --allow-code "{name}"' in warning
    main(["report", str(stranger), "--allow-code", name])
    assert Path("ran").exists()


@pytest.mark.parametrize("field", NAMING_FIELDS)
@pytest.mark.parametrize("command", ["generate", "convert"])
def test_generate_and_convert_run_no_code_that_a_manifest_names(stranger, capsys, field, command) -> None:
    name = "runs.stranger.payload:X"
    checkpoint_that_names(stranger, field, name)
    words = {
        "generate": ["generate", "--checkpoint", str(stranger), "--prompt", "a", "--max-tokens", "1"],
        "convert": ["convert", "--to-hf", str(stranger), "out"],
    }[command]
    code = main(words)
    assert not Path("ran").exists() and "runs.stranger.payload" not in sys.modules and os.getcwd() not in sys.path
    if command == "generate" or field == "model.family":
        assert code == 2
        assert "names code outside titanmoe, which is not run unless" in capsys.readouterr().err


def test_the_checkpoint_command_runs_no_code(stranger) -> None:
    checkpoint_that_names(stranger, "model.family", "runs.stranger.payload:X")
    for words in (["ls"], ["inspect"], ["verify"], ["diff", str(stranger)]):
        assert main(["checkpoint", *words, str(stranger)]) == 0
    assert not Path("ran").exists()


def test_generate_runs_a_family_that_the_user_names_too(stranger, capsys) -> None:
    (stranger / "payload.py").write_text(PAYLOAD + FAMILY)
    name = "runs.stranger.payload:X"
    checkpoint_that_names(stranger, "model.family", name)
    words = ["generate", "--checkpoint", str(stranger), "--prompt", "a", "--max-tokens", "1"]
    assert main(words) == 2 and not Path("ran").exists()
    assert main([*words, "--allow-code", "runs.stranger.payload:Other"]) == 2 and not Path("ran").exists()
    main([*words, "--allow-code", name])
    assert Path("ran").exists()
    with pytest.raises(SystemExit):
        main([*words, "--allow-code", "payload"])


ONE_RANK = ["train", "debug", "--ranks=1", "--parallelism.tp=1", "--parallelism.experts.ep=1"]
READ_BY_TRAIN = {
    "teacher": ["--training.objective=distillation", "--distillation.teacher=runs/stranger"],
    "resume": ["--model.hf=gone", "--job.dump_folder=runs", "--job.name=stranger", "--checkpoint.enable"],
}


@pytest.mark.parametrize("words", READ_BY_TRAIN.values(), ids=READ_BY_TRAIN)
def test_train_runs_no_code_that_a_checkpoint_it_reads_names(stranger, capsys, words) -> None:
    name = "runs.stranger.payload:X"
    checkpoint_that_names(stranger, "model.family", name)
    assert main([*ONE_RANK, *words]) == 2
    assert not Path("ran").exists() and os.getcwd() not in sys.path
    assert f'if you trust that code, add --allow-code "{name}"' in capsys.readouterr().err
    if "teacher" in words[-1]:  # there is no family in it yet
        assert main([*ONE_RANK, *words, "--allow-code", name]) == 2
        assert "payload:X has no `spec`, an instance of Family" in capsys.readouterr().err
        del sys.modules["runs.stranger.payload"]
        Path("ran").unlink()
    (stranger / "payload.py").write_text(PAYLOAD + FAMILY)
    with contextlib.suppress(SystemExit):
        main([*ONE_RANK, *words, "--allow-code", name, "--print-config"])
    assert Path("ran").exists()


SAFE_PATH = pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of Python 3.11")


@SAFE_PATH
def test_python_as_ranks_start_it_does_not_search_the_current_folder_first(stranger, monkeypatch) -> None:
    Path("random.py").write_text(PAYLOAD)

    def launch(options, words, logs) -> None:
        subprocess.run([sys.executable, "-c", "import random"], env=os.environ | logs.environment, check=True)
        sys.exit("started")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(agent, "launch", launch)
    with pytest.raises(SystemExit, match="started"):
        main(ONE_RANK)
    assert not Path("ran").exists()


@SAFE_PATH
def test_ranks_do_not_search_the_current_folder_before_the_standard_library(stranger) -> None:
    Path("bin").mkdir()
    Path("bin/titanmoe.py").write_text("import sys; del sys.path[0]; from titanmoe.cli import command; command()\n")
    Path("random.py").write_text(PAYLOAD)
    words = ["--training.steps=1", "--training.global_batch_size=4", "--job.dump_folder=mine"]
    done = subprocess.run(
        [sys.executable, "bin/titanmoe.py", *ONE_RANK, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(titanmoe.__file__).parents[1])},
    )
    assert not Path("ran").exists()
    assert done.returncode == 0 and "step 1/1" in done.stdout, done.stderr


def test_report_opens_no_model_that_a_config_names(stranger, monkeypatch) -> None:
    from titanmoe.checkpoint.hf import read_model_file

    opened: list[str] = []
    monkeypatch.setattr(read_model_file, "describing_folder", opened.append)
    text = (stranger / CONFIG).read_text().replace('hf = ""', 'hf = "someone/their-model"')
    assert "someone/their-model" in text
    (stranger / CONFIG).write_text(text)
    assert main(["report", str(stranger)]) == 0 and opened == []
    assert "mixtral" in (stranger / "report/report.html").read_text()


# ---- links


@pytest.fixture
def home(stranger) -> Path:
    """A folder of the user's, next to the runs, with a file of each name that links lead to."""
    folder = Path("home").absolute()
    (folder / "folder").mkdir(parents=True)
    for name in ("secret", "folder/secret", "folder/report.html", "folder/latest"):
        (folder / name).write_text('{"step": 3, "kind": "secret", "text": "secret", "time": "secret", "loss": 77.5}\n')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def link(path: Path, target: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name("before"))
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["report", "report/report.html"])
def test_report_writes_through_no_link(stranger, home, capsys, name) -> None:
    link(stranger / name, home / ("folder" if name == "report" else "secret"))
    before = contents(home)
    assert main(["report", str(stranger)]) == 2
    assert contents(home) == before
    assert "report.html: is a link to" in capsys.readouterr().err


@pytest.mark.parametrize("name", [CONFIG, EVENTS, METRICS, "ranks.jsonl", "experts.jsonl", "quiz.jsonl"])
def test_report_shows_nothing_that_a_link_leads_to(stranger, home, capsys, name) -> None:
    link(stranger / name, home / "secret")
    assert main(["report", str(stranger)]) == (2 if name == METRICS else 0)
    page = stranger / "report/report.html"
    assert "secret" not in (page.read_text() if page.exists() else "")
    assert f"{name} is a link to" in capsys.readouterr().err


LINKS = {"lock": "secret", CONFIG: "secret", METRICS: "secret", EVENTS: "secret", "ranks.jsonl": "secret"}
LINKS |= {"experts.jsonl": "secret", "quiz.jsonl": "secret", "wandb-id": "secret", "metrics.jsonl.new": "secret"}
LINKS |= {"checkpoints": "folder", "tensorboard": "folder", "profile": "folder", "profile/x": "secret"}


@pytest.mark.parametrize("name", LINKS)
def test_train_writes_through_no_link(stranger, home, capsys, name) -> None:
    link(stranger / name, home / LINKS[name])
    before = contents(home)
    words = ["--job.dump_folder", "runs", "--job.name", "stranger", "--checkpoint.enable", "--training.steps", "1"]
    assert main(["train", "debug", "--ranks", "1", "--parallelism.tp=1", "--parallelism.experts.ep=1", *words]) == 2
    assert contents(home) == before
    assert f"{stranger.name}/{name} is a link to" in capsys.readouterr().err


@pytest.mark.parametrize("continues", [True, False])
def test_each_rank_0_refuses_links_before_it_writes(stranger, home, continues) -> None:
    """Under torchrun no launcher has looked."""
    from titanmoe.config import ConfigError
    from titanmoe.config.schema import Checkpoint, Job
    from titanmoe.train.run_folder import claim_folder

    link(stranger / CONFIG, home / "secret")
    (stranger / METRICS).unlink()
    before = contents(home)
    with pytest.raises(ConfigError, match=r"config\.toml is a link to"):
        claim_folder(Job(dump_folder="runs", name="stranger"), Checkpoint(enable=continues))
    assert contents(home) == before and not (stranger / METRICS).exists()


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step-00000007"])
def test_checkpoints_that_are_links_are_not_read(stranger, home, capsys, place) -> None:
    path = checkpoint_that_names(home, "model.family", "mixtral")
    link(stranger / place, path.parent if place == "checkpoints" else path)
    run = str(stranger)
    for words in (
        ["generate", "--prompt", "a", "--checkpoint", run],
        ["convert", "--to-hf", run, "out"],
        ["checkpoint", "ls", run],
        ["checkpoint", "inspect", run],
        ["checkpoint", "diff", str(home), run],
    ):
        assert main(words) == 2
        assert f"{place} is a link to" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(stranger)]) in (1, 2)
    named = stranger / place  # the folder that the user names may be a link
    assert main(["checkpoint", "verify", str(named)]) == 0


@pytest.mark.parametrize("suffix", ["", layout.WRITING])
def test_a_run_does_not_go_on_from_a_checkpoint_that_is_a_link(stranger, home, suffix) -> None:
    checkpoint_that_names(home, "model.family", "mixtral")
    folder = stranger / "checkpoints"
    folder.mkdir()
    link(folder / f"step-00000009{suffix}", home / "checkpoints/step-00000007")
    with pytest.raises(CheckpointError, match=rf"step-00000009{suffix}: .*{suffix} is a link to"):
        choose_start(Checkpoint(enable=True), stranger, layout.find_damage)
    own = checkpoint_that_names(stranger, "model.family", "mixtral")
    start = choose_start(Checkpoint(enable=True), stranger, layout.find_damage)
    assert start.path == own and [path.name for path in start.passed_over] in ([], [f"step-00000009{suffix}"])


def test_what_is_exchanged_for_a_link_while_it_is_opened_is_not_followed(tmp_path, monkeypatch) -> None:
    """Whatever the checks before saw: the folder in between is opened by its descriptor."""
    (tmp_path / "run/hf").mkdir(parents=True)
    (tmp_path / "run/hf/x").write_text("own")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/x").write_text("secret")
    real, opened = os.open, []

    def exchange(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("x") and not opened:
            opened.append(path)
            (tmp_path / "run/hf").rename(tmp_path / "run/before")
            (tmp_path / "run/hf").symlink_to(tmp_path / "home")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", exchange)
    with safe_files.open_file(tmp_path / "run", "hf/x") as stream:
        assert stream.read() == b"own" and opened
    with pytest.raises(CheckpointError, match="is a link to"):
        safe_files.open_file(tmp_path / "run", "hf/x")
    with pytest.raises(safe_files.NotRegularFile, match="is a link to"):
        safe_files.write(tmp_path / "run", "hf/x", b"mine")
    assert (tmp_path / "home/x").read_text() == "secret"
