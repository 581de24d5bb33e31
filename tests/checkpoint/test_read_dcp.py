"""Folders of torch.distributed.checkpoint that are made to do harm: nothing runs, one line says what is wrong."""

from __future__ import annotations

import os
import pickle
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tests.checkpoint.folders import Calls
from titanmoe.checkpoint import read_dcp
from titanmoe.checkpoint.follow_pickle import OBJECTS, VALUES, follow
from titanmoe.checkpoint.read_dcp import NAMES, DcpFolder
from titanmoe.checkpoint.safe_files import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"a.x": torch.arange(12.0).view(3, 4), "a.y": torch.ones(2), "step": 3}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def change(folder: Path, edit: Callable[[Metadata], Any]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(edit(metadata) or metadata))


def entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["a.x"]


def place(metadata: Metadata, **values: Any) -> None:
    index = MetadataIndex("a.x", torch.Size((0, 0)))
    old = metadata.storage_data[index]
    metadata.storage_data[index] = _StorageInfo(**{**vars(old), **values})


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_honest_folder_is_read(folder: Path, protocol: int) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    got = DcpFolder(folder, ("a.",))
    assert torch.equal(got.read("a.x", (1, 1), (2, 3)), torch.arange(12.0).view(3, 4)[1:, 1:])
    assert got.tensors["a.y"] == ((2,), torch.float32) and got.others == ["step"]


def deep(metadata: Metadata) -> Any:
    value: Any = ()
    for _ in range(400):
        value = (value,)
    metadata.planner_data = {value: value}
    entry(metadata).size = value


def huge_block(metadata: Metadata) -> None:
    entry(metadata).size = entry(metadata).chunks[0].sizes = torch.Size((1 << 30, 4))


LIES: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "code": (lambda m: Calls(os.system, "touch ran"), "that needs no 'posix system'"),
    "code within": (
        lambda m: setattr(m, "planner_data", Calls(eval, "open('ran', 'w')")),
        "that needs no 'builtins eval'",
    ),
    "memory": (lambda m: Calls(bytearray, 3 << 30), "that needs no 'builtins bytearray'"),
    "another class": (lambda m: m.storage_meta, "an entry is not a Metadata"),
    "a storage": (
        lambda m: setattr(m, "planner_data", torch.zeros(2).untyped_storage()),
        "that needs no 'torch.storage _load_from_bytes'",
    ),
    "bytes for a tensor": (
        lambda m: m.state_dict_metadata.update({"a.x": BytesStorageMetadata()}),
        "a.x is not a tensor",
    ),
    "deep": (deep, "an entry is not a torch.Size"),
    "huge": (lambda m: setattr(entry(m), "size", torch.Size((1 << 40, 1 << 20))), "the blocks of a.x do not make up"),
    "huge block": (huge_block, "is larger than its"),
    "many dims": (lambda m: setattr(entry(m), "size", torch.Size([1 << 62] * 100)), "an entry is not a torch.Size"),
    "negative": (lambda m: place(m, offset=-1), "are not sizes"),
    "beyond the file": (lambda m: place(m, offset=1 << 40), "which that file does not have"),
    "twice in one place": (
        lambda m: place(m, **vars(m.storage_data[MetadataIndex("a.y", torch.Size((0,)))])),
        "two blocks share byte",
    ),
    "another folder": (lambda m: place(m, relative_path="../x"), "only files in the folder itself are read"),
    "compressed": (lambda m: place(m, transform_descriptors=["zstd"]), "save the checkpoint again without extensions"),
    "a block without a place": (lambda m: m.storage_data.clear(), "KeyError"),
    "a dict for a list": (lambda m: setattr(entry(m), "chunks", {"a": 1}), "is not a ChunkStorageMetadata"),
    "a text for a dict": (lambda m: setattr(m, "storage_data", "x"), "an entry is not a dict"),
    "a name that is none": (lambda m: m.state_dict_metadata.update({3: entry(m)}), "an entry is not a text"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_folder_that_lies_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    edit, words = LIES[name]
    change(folder, edit)
    refuse(folder, monkeypatch, words)


def refuse(folder: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(folder.parent)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=re.escape(words)) as refused:
        DcpFolder(folder, ("a.",)).read("a.x")
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "pickle exhausted"),
        (b"\x80\x04", "pickle exhausted"),
        (b"not a pickle", "opcode"),
        (b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b".", "remain"),  # so many bytes
        (b"\x80\x04\x94.", "do not fit together"),  # memorises nothing
        (b"\x80\x02Nr" + b"\xff" * 4 + b".", "do not fit together"),  # in the place 4,294,967,295
        (b"\x80\x04h\x05.", "do not fit together"),
        (b"\x80\x04ub.", "do not fit together"),
        (b"\x80\x04]N(NNu.", "do not fit together"),
        (b"\x80\x04]0.", "needs no POP"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "that needs no 'os system'"),
        (b"\x80\x02cos\nsystem\n.", "that needs no 'os system'"),
        # lists, tuples and calls in others, and a dict that is its own key
        (b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".", "an entry is not a Metadata"),
        (b"\x80\x04)" + b"\x85" * 300_000 + b".", "an entry is not a Metadata"),
        (b"\x80\x04)" + b")R" * 300_000 + b".", "an entry is not a Metadata"),
        (b"\x80\x04}\x94(h\x00h\x00u.", "an entry is not a Metadata"),
    ],
    ids=range(16),
)
def test_what_is_no_pickle_of_torchs_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, words: str
) -> None:
    (folder / ".metadata").write_bytes(data)
    refuse(folder, monkeypatch, words)


def test_a_metadata_that_is_too_large_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_dcp, "MOST_BYTES", 100)
    refuse(folder, monkeypatch, "has more than 100 bytes")


def test_a_metadata_that_is_cut_anywhere_is_one_line(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for end in range(0, len(data), 7):
        (folder / ".metadata").write_bytes(data[:end])
        with pytest.raises(CheckpointError, match="cannot be read"):
            DcpFolder(folder, ("a.",))


def test_files_that_are_missing_short_or_links_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-200])
    refuse(folder, monkeypatch, "which that file does not have")
    file.rename(folder.parent / "elsewhere")
    refuse(folder, monkeypatch, "cannot be read")
    file.symlink_to(folder.parent / "elsewhere")
    refuse(folder, monkeypatch, "links are not followed")


def test_a_block_that_is_code_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = folder.glob("*.distcp")
    torch.save(Calls(os.system, "touch ran"), file)
    size = file.stat().st_size
    change(folder, lambda m: m.state_dict_metadata.pop("a.y") and place(m, offset=0, length=size))
    refuse(folder, monkeypatch, "the pickle is not one tensor of a CPU")


def test_names_that_are_allowed_are_no_functions_that_run_anything() -> None:
    assert not {name.split(" ")[0] for name in NAMES} & {"builtins", "os", "posix", "nt", "subprocess", "sys"}
    called = follow(pickle.dumps(torch.Size((1, 2))), VALUES | OBJECTS, "a size", NAMES)
    assert type(called).__name__ == "PickledCall"  # and not a Size
