"""Hand-made checkpoints, and ways to corrupt them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.manifest import with_checksum
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.write_tensors import LazyTensor


def make(folder: Path, step: int, number: int | None = None) -> Path:
    path = folder / layout.folder_name(step)
    tensor = torch.full((64,), float(step))
    write_checkpoint(path, {"model.a": LazyTensor((64,), torch.float32, slice_of_full(lambda: tensor))}, {"step": step})
    if number is not None:
        rewrite(path, number=number)
    layout.write_latest(folder, path.name)
    return path


def manifest_of(path: Path) -> dict[str, Any]:
    """The contents of a manifest."""
    return json.loads((path / layout.MANIFEST).read_text())


def rewrite(path: Path, **entries: Any) -> None:
    """Other entries in a manifest, with a new checksum, as an attacker would do."""
    content = manifest_of(path) | entries
    content.pop("sha256", None)
    (path / layout.MANIFEST).write_text(with_checksum(json.dumps(content, indent=1)))


def spoil(path: Path, name: str, data: bytes) -> None:
    """Other bytes in a file, with the checksum that the manifest then needs."""
    (path / name).write_bytes(data)
    files = manifest_of(path)["files"] | {name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}}
    rewrite(path, files=files)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


class Calls:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *args: Any):
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call
