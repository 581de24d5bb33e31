"""The folder of a stranger's run: no command runs its code, writes through its links or opens what they lead to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import parity, reference
from tests.report.test_report import make_run
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.blocks import reader_of
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.cli import main
from titanmoe.config.allowed_code import NAMING_FIELDS, VARIABLE
from titanmoe.config.fields import nested
from titanmoe.parts import PARTS
from titanmoe.train.run_folder import CONFIG

# ---- code

PAYLOAD = "from pathlib import Path\nPath('ran').touch()\nclass X: pass\n"


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
    path = run / "checkpoints" / layout.name_of(7)
    tensors = {
        f"model.{key}": LazyTensor(tuple(x.shape), x.dtype, reader_of(lambda x=x: x))
        for key, x in (reference.initial_weights(config.model, 0) | reference.initial_bias(config.model)).items()
    }
    record = nested(config)
    table, _, key = field.partition(".")
    record[table][key] = value_of(field, name)
    write_checkpoint(path, tensors, {"step": 7, "config": record})
    layout.write_latest(path.parent, path.name)
    return path


def test_the_fields_that_name_components_are_those_of_the_tables() -> None:
    assert sorted(NAMING_FIELDS) == sorted(kind.field for kind in PARTS.kinds)


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
    (stranger / "payload.py").write_text(
        PAYLOAD + "from titanmoe.models.families import family_of\nFamily = family_of('mixtral')\n"
    )
    name = "runs.stranger.payload:Family"
    checkpoint_that_names(stranger, "model.family", name)
    words = ["generate", "--checkpoint", str(stranger), "--prompt", "a", "--max-tokens", "1"]
    assert main(words) == 2 and not Path("ran").exists()
    assert main([*words, "--allow-code", "runs.stranger.payload:Other"]) == 2 and not Path("ran").exists()
    main([*words, "--allow-code", name])
    assert Path("ran").exists()
    with pytest.raises(SystemExit):
        main([*words, "--allow-code", "payload"])


def test_report_opens_no_model_that_a_config_names(stranger, monkeypatch) -> None:
    from titanmoe.checkpoint.hf import read_model_file

    opened: list[str] = []
    monkeypatch.setattr(read_model_file, "describing_folder", opened.append)
    text = (stranger / CONFIG).read_text().replace('hf = ""', 'hf = "someone/their-model"')
    assert "someone/their-model" in text
    (stranger / CONFIG).write_text(text)
    assert main(["report", str(stranger)]) == 0 and opened == []
    assert "mixtral" in (stranger / "report/report.html").read_text()
