"""Folders made to do harm: nothing in them runs, nothing outside them is read, sizes are bounded."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import folders
from tests.checkpoint.folders import Calls
from titanmoe.checkpoint import layout, safe_files, tensor_index
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.manifest import Checksum
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.checkpoint.saved_tensor import read_saved_tensor

ROOT = Path(__file__).resolve().parents[2]


# ---- no pickle


UNPICKLES = re.compile(
    r"^[ \t]*(?:import|from)\s+(?:pickle|_pickle|dill|cloudpickle|shelve|marshal|joblib)\b.*"
    r"|torch\.load\((?!.*weights_only=True).*"
    r"|\b(?:FileSystemReader|read_metadata|allow_pickle(?!=False)|dcp\.load\b|pickle\.loads?\b|pickle\.Unpickler)",
    re.MULTILINE,
)


WRITES = {"titanmoe/checkpoint/dcp_metadata.py": ["import pickle"]}
"""The one module that pickles, for tools of PyTorch: it writes and does not read."""


def test_no_module_unpickles() -> None:
    files = {file.relative_to(ROOT).as_posix(): file.read_text() for file in sorted(ROOT.glob("titanmoe/**/*.py"))}
    unpicklers = {name: hits for name, text in files.items() if (hits := UNPICKLES.findall(text))}
    assert len(files) > 100 and unpicklers == WRITES
    assert {name for text in map(files.get, WRITES) for name in re.findall(r"pickle\.(\w+)", text)} == {"dumps"}
    for line in (
        "  from pickle import loads",
        "torch.load(file)",
        "reader = FileSystemReader(path)",
        "pickle.loads(x)",
    ):
        assert UNPICKLES.search(line)


# ---- tensors.json and what it describes

FILES = {"a.distcp": Checksum(1000, 0)}


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
    (tensor,) = tensor_index.parse_entries(described(), FILES).values()
    assert tensor.shape == (4, 3)
    assert tensor_index.parse_entries(json.loads(tensor_index.to_json({"x": tensor})), FILES) == {"x": tensor}


@pytest.mark.parametrize("name", LIES)
def test_a_description_that_lies_is_one_line(tmp_path: Path, name: str) -> None:
    path = folders.make(tmp_path, 1)
    folders.spoil(path, "a.distcp", b"\0" * 1000)
    folders.spoil(path, tensor_index.TENSOR_INDEX, json.dumps(LIES[name]).encode())
    with pytest.raises(CheckpointError, match=r"tensors\.json cannot be read: (\w+Error|TooDeep) ") as refused:
        Checkpoint(path).read("x")
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
        (
            lambda: torch.zeros(65),
            r"a block is \(65,\) of torch.float32, and tensors.json says \(64,\) of torch.float32",
        ),
        (lambda: torch.zeros(64, dtype=torch.float64), "of torch.float64, and tensors.json says"),
        (lambda: torch.zeros(64, dtype=torch.float8_e4m3fn), "of torch.float8_e4m3fn, and tensors.json says"),
        (lambda: [torch.zeros(64)], "the pickle is not one tensor: that needs no EMPTY_LIST"),
        (lambda: {"a": torch.zeros(64)}, "the pickle is not one tensor: that needs no EMPTY_DICT"),
        (lambda: (torch.zeros(64), Calls(bytearray, 3 << 30)), "the pickle is not one tensor"),
        (lambda: Calls(bytearray, 3 << 30), "the pickle is not one tensor of a CPU"),
        (lambda: Calls(os.system, "touch ran"), "the pickle is not one tensor of a CPU"),
        (lambda: "x" * (1 << 20), "the description of the tensor has 1,048,"),
        (lambda: torch.nn.Parameter(torch.zeros(64)), "the pickle is not one tensor"),
        (None, "the archive is compressed"),
    ],
    ids=[*("shape", "dtype", "wide", "list", "table", "pair", "bytes", "code", "text", "parameter", "compressed")],
)
def test_a_block_that_is_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any, words: str
) -> None:
    path, buffer = folders.make(tmp_path, 1), io.BytesIO()
    torch.save(stored() if stored else torch.zeros(64), buffer)
    data = buffer.getvalue() if stored else deflated(buffer.getvalue())
    folders.spoil(path, "rank-00000-000.distcp", data)
    entries = {
        "model.a": {"dtype": "float32", "shape": [64], "blocks": [[[0], [64], "rank-00000-000.distcp", 0, len(data)]]}
    }
    folders.spoil(path, tensor_index.TENSOR_INDEX, json.dumps(entries).encode())
    monkeypatch.chdir(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=rf"rank-00000-000\.distcp cannot be read: .*{words}") as refused:
        Checkpoint(path).read("model.a")
    assert "\n" not in str(refused.value) and not (tmp_path / "ran").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"


@pytest.mark.parametrize("dtype", [dtype for name, dtype in sorted(tensor_index.DTYPES.items()) if name[0] != "q"])
def test_what_torch_save_wrote_is_found_whatever_the_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(4 * 6 * dtype.itemsize, dtype=torch.uint8)
    try:
        x = x.view(dtype).view(4, 6)[1:, ::2]
        torch.save(x, stream := io.BytesIO())
    except (RuntimeError, KeyError):
        pytest.skip("torch does not save it")
    saved = read_saved_tensor(stream)
    assert (saved.dtype, saved.shape, saved.strides) == (dtype, (3, 3), (6, 2))
    numbers = tensor_index.StridedData(saved.start, saved.strides, saved.dtype)
    read = numbers.read(stream, (0, 0), (3, 3))
    assert torch.equal(read.contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))
    assert numbers.end(saved.shape) <= saved.end <= len(stream.getvalue())


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 70000), (2, 1, 3, 1, 2)])
def test_what_torch_save_wrote_is_found_whatever_the_shape(shape: tuple[int, ...]) -> None:
    torch.save(torch.ones(shape), stream := io.BytesIO())
    saved = read_saved_tensor(stream)
    assert saved.shape == shape and saved.strides == torch.ones(shape).stride()


def test_an_archive_cut_or_changed_anywhere_is_refused_or_harmless() -> None:
    """Each byte of the small archive of a tensor flipped, and each of its beginnings."""
    torch.save(torch.ones(3), stream := io.BytesIO())
    data, refused = stream.getvalue(), 0
    spoiled = [data[:n] for n in range(len(data))]
    spoiled += [data[:n] + bytes([data[n] ^ 1 << n % 8]) + data[n + 1 :] for n in range(len(data))]
    for other in spoiled:
        try:
            saved = read_saved_tensor(io.BytesIO(other))
            assert isinstance(saved.dtype, torch.dtype) and saved.start >= 0
        except Exception as error:  # the caller makes one line of any
            assert not isinstance(error, MemoryError)
            refused += 1
    assert refused > len(data)


def test_an_entry_beyond_the_end_of_the_archive_is_refused() -> None:
    torch.save(torch.ones(3), stream := io.BytesIO())
    data = bytearray(stream.getvalue())
    first = data.index(b"PK\1\2")  # in the archive's directory, whose offset of the contents is at byte 42
    data[first + 42 : first + 46] = len(data).to_bytes(4, "little")
    with pytest.raises(ValueError, match=r"data\.pkl is not where the list of files says"):
        read_saved_tensor(io.BytesIO(data))


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
    (line,) = layout.find_damage(path)
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
    (line,) = layout.find_damage(path)
    assert ("is not a regular file" if kind in ("pipe", "folder") else "is a link to") in line
    with pytest.raises(CheckpointError):
        layout.carried_files(path)


def test_a_manifest_or_latest_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    path = folders.make(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("/dev/zero")
    assert layout.read_latest(tmp_path) == ""
    os.rename(path / "manifest.json", tmp_path / "elsewhere")
    (path / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"manifest\.json is a link"):
        layout.read_manifest(path)


def test_a_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(folders.make(tmp_path / "there", 7))
    assert layout.find_damage(tmp_path / "here") == [] and Checkpoint(tmp_path / "here").read("model.a")[0] == 7


def test_files_are_read_only_as_far_as_the_manifest_says(tmp_path: Path) -> None:
    path = folders.make(tmp_path, 1)
    with open(path / tensor_index.TENSOR_INDEX, "ab") as stream:
        stream.write(b"\0")
        stream.flush()
        assert "bytes but was written with" in layout.find_damage(path, contents=False)[0]
        stream.truncate(1 << 40)  # sparse
    assert "has 1,099,511,627,776 bytes but was written with" in layout.find_damage(path)[0]
    with pytest.raises(CheckpointError, match=r"tensors.json has more than \d+ bytes"):
        Checkpoint(path).read("model.a")
