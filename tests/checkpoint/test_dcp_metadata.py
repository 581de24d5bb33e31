"""`titanmoe checkpoint dcp`: what four ranks saved is read by PyTorch's own tools, in a process without titanmoe."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import world
from tests.checkpoint import folders, runs
from tests.checkpoint.folders import Calls
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.cli import main

TOOLS = """
import sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.simplefilter("ignore")
folder, loaded, unsharded = sys.argv[1:]
entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
state = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
dcp.load(state, checkpoint_id=folder)
torch.save(state, loaded)
dcp_to_torch_save(folder, unsharded)
assert not any(name.startswith("titanmoe") for name in sys.modules)
"""
FOLDED = {"parallelism.tp": 2, "parallelism.experts.ep": 2, "parallelism.experts.etp": 2}


def test_tools_of_pytorch_read_what_we_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    world.run(4, runs.go, str(tmp_path), FOLDED, runs.SAVED, timeout=120)
    assert main(["checkpoint", "dcp", str(tmp_path / "run")]) == 0
    path = tmp_path / "run/checkpoints" / layout.folder_name(runs.SAVED)
    assert capsys.readouterr().out.startswith(f"{path}/.metadata: ")
    assert len(list(path.glob("*.distcp"))) == 4
    outputs = tmp_path / "loaded.pt", tmp_path / "unsharded.pt"
    command = [sys.executable, "-c", TOOLS, path, *outputs]
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, timeout=120)
    ours = Checkpoint(path)
    assert any(name.startswith("model.") for name in ours.tensors)
    assert any(name.startswith("optimizer.") for name in ours.tensors)
    assert any(len(tensor.blocks) == 4 for tensor in ours.stored.values())
    for theirs in map(torch.load, outputs):
        assert theirs.keys() == ours.tensors.keys()
        for name, tensor in theirs.items():
            assert torch.equal(tensor, ours.read(name)) and tensor.dtype == ours.tensors[name][1], name
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0


def test_it_is_there_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    path = folders.make(tmp_path, 1)
    before = sorted(path.iterdir())

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(["checkpoint", "dcp", str(path)]) == 2
    assert ".metadata.new: No space left on device: " in capsys.readouterr().err
    assert sorted(path.iterdir()) == before
    (path / "rank-00000-000.distcp").write_bytes(b"short")
    assert main(["checkpoint", "dcp", str(path)]) == 2
    assert "rank-00000-000.distcp has 5 bytes but was written with" in capsys.readouterr().err
    assert sorted(path.iterdir()) == before


def test_nothing_of_ours_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders.make(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps(Calls(os.system, "touch ran")))
    for action in ("ls", "inspect", "verify", "dcp"):
        assert main(["checkpoint", action, str(path)]) == 0
    assert b"touch" not in (path / ".metadata").read_bytes() and not (tmp_path / "ran").exists()
