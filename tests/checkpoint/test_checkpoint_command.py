"""titanmoe checkpoint, as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.folders import flip_a_bit
from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.cli import main

RECORD = {
    "tokens": 4096.0,
    "mapping": {"attention": {"pp": 1, "tp": 2}, "experts": {"ep": 2, "etp": 1}},
    "config": {"model": {"family": "mixtral", "size": "debug"}, "optimizer": {"lr": 0.1}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run/checkpoints"
    for step in (2, 10):
        tensors = {
            f"model.layers.{i}.x": LazyTensor(
                (2, 3), torch.float32, slice_of_full(lambda i=i, step=step: torch.full((2, 3), i * float(step)))
            )
            for i in (0, 1, 10)
        }
        write_checkpoint(folder / layout.folder_name(step), tensors, RECORD | {"step": step})
    layout.write_latest(folder, layout.folder_name(10))
    return tmp_path / "run"


def ask(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, list[str], str]:
    code = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return code, [" ".join(line.split()) for line in out.splitlines()], err


def test_ls(run, capsys):
    code, out, _ = ask(capsys, "ls", run)
    assert code == 0 and out[0] == "step made size tokens attention experts"
    assert out[1].startswith("2 20") and out[1].endswith("KB 4,096 tp 2 ep 2")
    assert out[2].startswith("10 20") and out[2].endswith("tp 2 ep 2 latest")


def test_inspect_shows_the_latest_in_the_order_of_layers(run, capsys):
    code, out, _ = ask(capsys, "inspect", run)
    assert code == 0 and "step 10" in out and "model mixtral debug" in out
    assert out[-4:-1] == [
        "model.layers.0.x 2 x 3 float32 0",
        f"model.layers.1.x 2 x 3 float32 {10 * 6**0.5:.6g}",
        f"model.layers.10.x 2 x 3 float32 {100 * 6**0.5:.6g}",
    ]
    assert out[-1] == "3 of 3 tensors"
    _, out, _ = ask(capsys, "inspect", run / "checkpoints/step-00000002", "--match", "*.1.x", "--no-norms")
    assert out[-2:] == ["model.layers.1.x 2 x 3 float32", "1 of 3 tensors"]


def test_verify_reads_every_file(run, capsys):
    code, out, _ = ask(capsys, "verify", run)
    assert code == 0 and len(out) == 2 and all("intact" in line for line in out)
    flip_a_bit(run / "checkpoints/step-00000002/rank-00000-000.distcp")
    code, out, _ = ask(capsys, "verify", run)
    assert code == 1 and "its contents have changed" in out[0] and "intact" in out[1]
    assert ask(capsys, "verify", run, "--latest")[0] == 0


def test_diff(run, capsys):
    a, b = (run / "checkpoints" / layout.folder_name(step) for step in (2, 10))
    code, out, _ = ask(capsys, "diff", a, b)
    assert code == 1 and out[0] == "step: 2 -> 10"
    assert out[2:] == ["model.layers.1.x 8 4", "model.layers.10.x 80 4", "1 of 3 tensors are equal"]
    assert ask(capsys, "diff", b, run) == (0, ["3 of 3 tensors are equal"], "")


@pytest.mark.parametrize("action", ["ls", "inspect", "verify"])
def test_other_folders_are_one_line_and_code_2(tmp_path, capsys, action):
    code, out, err = ask(capsys, action, tmp_path / "nothing")
    fix = "name that of a run or of a checkpoint"
    assert (code, out) == (2, []) and err == f"error: {tmp_path / 'nothing'}: no such folder: {fix}\n"


def test_a_damaged_manifest_is_listed_with_the_others(run, capsys):
    (run / "checkpoints/step-00000002" / layout.MANIFEST).write_text("{")
    code, out, _ = ask(capsys, "ls", run)
    assert code == 0 and "manifest.json is damaged" in out[1] and out[2].startswith("10")
    assert "checkpoint ls" not in out[1], "this is the list that the advice names"
    assert "use another checkpoint (titanmoe checkpoint ls RUN)" in ask(capsys, "inspect", f"{run}:2")[2]
    assert ask(capsys, "verify", run)[0] == 1
