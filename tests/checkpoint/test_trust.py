"""Folders made to do harm: nothing in them runs, nothing outside them is read, sizes are bounded."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import folders
from titanmoe.checkpoint import layout, safe_files, tensors
from titanmoe.checkpoint.checkpoint_folder import open_checkpoint
from titanmoe.checkpoint.manifest import Sum
from titanmoe.checkpoint.safe_files import CheckpointError

ROOT = Path(__file__).resolve().parents[2]


# ---- no pickle


UNPICKLES = re.compile(
    r"^\s*(?:import|from)\s+(?:pickle|_pickle|dill|cloudpickle|shelve|marshal|joblib)\b.*"
    r"|torch\.load\((?!.*weights_only=True).*"
    r"|\b(?:FileSystemReader|read_metadata|allow_pickle|dcp\.load\b|pickle\.loads?\b|pickle\.Unpickler)",
    re.MULTILINE,
)


def test_no_module_unpickles() -> None:
    files = sorted(ROOT.glob("titanmoe/**/*.py"))
    unpicklers = {file.name: hits for file in files if (hits := UNPICKLES.findall(file.read_text(encoding="utf-8")))}
    assert len(files) > 100 and unpicklers == {}
    for line in (
        "  from pickle import loads",
        "torch.load(file)",
        "reader = FileSystemReader(path)",
        "pickle.loads(x)",
    ):
        assert UNPICKLES.search(line)


class Calls:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *args: Any):
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


# ---- tensors.json and what it describes

FILES = {"a.distcp": Sum(1000, 0)}


def described(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "float32", "shape": [4, 3], "blocks": [[[0, 0], [4, 3], "a.distcp", 0, 400]]} | changes}


def block(*changes: Any) -> dict[str, Any]:
    return described(blocks=[[new if new is not None else old for new, old in zip(changes, BLOCK, strict=True)]])


BLOCK = [[0, 0], [4, 3], "a.distcp", 0, 400]
LIES = {
    "no table": [],
    "no tensor": {"x": 3},
    "dtype": described(dtype="os"),
    "dtype list": described(dtype=["float32"]),
    "negative": described(shape=[-4, -3]),
    "true": described(shape=[4, True]),
    "huge": described(shape=[10**12, 10**12]),
    "blocks": described(blocks={}),
    "two blocks of one place": described(shape=[8, 3], blocks=[BLOCK, [[4, 0], [4, 3], "a.distcp", 0, 400]]),
    "outside the tensor": block([1, 0], None, None, None, None),
    "other dims": block([0], [12], None, None, None),
    "a file of nobody": block(None, None, "b.distcp", None, None),
    "a path": block(None, None, "../a.distcp", None, None),
    "a file that is a list": block(None, None, ["a.distcp"], None, None),
    "beyond the file": block(None, None, None, 700, None),
    "before the file": block(None, None, None, -1, None),
    "less than it needs": block(None, None, None, None, 47),
    "deep": json.loads("[" * 400 + "]" * 400),
}


def test_an_honest_description_is_accepted() -> None:
    (tensor,) = tensors.from_json(json.dumps(described()).encode(), FILES).values()
    assert tensor.shape == (4, 3) and tensors.from_json(tensors.to_json({"x": tensor}), FILES) == {"x": tensor}


@pytest.mark.parametrize("name", LIES)
def test_a_description_that_lies_is_one_line(tmp_path: Path, name: str) -> None:
    path = folders.make(tmp_path, 1)
    folders.spoil(path, "a.distcp", b"\0" * 1000)
    folders.spoil(path, tensors.TENSORS, json.dumps(LIES[name]).encode())
    with pytest.raises(CheckpointError, match=r"tensors\.json cannot be read: (\w+Error|TooDeep) ") as refused:
        open_checkpoint(path).read("x")
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)


def deflated(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return out.getvalue()


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (lambda: torch.zeros(65), "it is not the"),
        (lambda: torch.zeros(64, dtype=torch.float64), "it is not the"),
        (lambda: [torch.zeros(64)], "it is not the"),
        (lambda: Calls(os.system, "false"), "UnpicklingError"),
        (None, "it is compressed"),
    ],
    ids=["shape", "dtype", "list", "code", "compressed"],
)
def test_a_block_that_is_something_else_is_refused(tmp_path: Path, stored: Any, words: str) -> None:
    path, buffer = folders.make(tmp_path, 1), io.BytesIO()
    torch.save(stored() if stored else torch.zeros(64), buffer)
    data = buffer.getvalue() if stored else deflated(buffer.getvalue())
    folders.spoil(path, "rank-00000-000.distcp", data)
    entries = {
        "model.a": {"dtype": "float32", "shape": [64], "blocks": [[[0], [64], "rank-00000-000.distcp", 0, len(data)]]}
    }
    folders.spoil(path, tensors.TENSORS, json.dumps(entries).encode())
    with pytest.raises(CheckpointError, match=rf"rank-00000-000\.distcp cannot be read: .*{words}") as refused:
        open_checkpoint(path).read("model.a")
    assert "\n" not in str(refused.value)


# ---- names

NAMES = [
    "../secret", "hf/../../secret", "/etc/hostname", "//etc/hostname", "/dev/zero", "", ".", "..", "hf/", "./x",
    "hf//x", "x/../x", "x\0", "\0",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    path = folders.make(tmp_path / "run", 7)
    (tmp_path / "run/secret").write_text("it")
    folders.rewrite(path, files=folders.manifest_of(path)["files"] | {name: {"bytes": 2, "crc32": "00000000"}})
    (line,) = layout.damage(path)
    assert f"names {name!r}, which is not in it" in line
    with pytest.raises(CheckpointError, match="which is not in it"):
        safe_files.open_file(path, name)


@pytest.mark.parametrize("kind", ["link", "link to a folder", "device", "pipe", "folder"])
def test_only_regular_files_of_the_folder_are_opened(tmp_path: Path, kind: str) -> None:
    path, secret = folders.make(tmp_path, 7), tmp_path / "home"
    secret.mkdir()
    (secret / "config.json").write_text("it")
    (path / "hf").mkdir()
    file = path / "hf/config.json"
    if kind == "link to a folder":
        (path / "hf").rmdir()
        (path / "hf").symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(secret / "config.json" if kind == "link" else "/dev/zero")
    folders.rewrite(
        path, files=folders.manifest_of(path)["files"] | {"hf/config.json": {"bytes": 2, "crc32": "00000000"}}
    )
    (line,) = layout.damage(path)
    assert ("is not a regular file" if kind in ("pipe", "folder") else "is a link to") in line
    with pytest.raises(CheckpointError):
        layout.carried(path)


def test_a_manifest_or_latest_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    path = folders.make(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("/dev/zero")
    assert layout.latest(tmp_path) == ""
    os.rename(path / "manifest.json", tmp_path / "elsewhere")
    (path / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"manifest\.json is a link"):
        layout.read_manifest(path)


def test_a_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(folders.make(tmp_path / "there", 7))
    assert layout.damage(tmp_path / "here") == [] and open_checkpoint(tmp_path / "here").read("model.a")[0] == 7


def test_files_are_read_only_as_far_as_the_manifest_says(tmp_path: Path) -> None:
    path = folders.make(tmp_path, 1)
    with open(path / tensors.TENSORS, "ab") as stream:
        stream.truncate(1 << 40)  # sparse
    assert "has 1,099,511,627,776 bytes but was written with" in layout.damage(path)[0]
    with pytest.raises(CheckpointError, match=r"tensors.json has more than \d+ bytes"):
        open_checkpoint(path).read("model.a")
