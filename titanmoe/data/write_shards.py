"""Token shards as they are written: complete files with their checksums, and the tokenizer beside them.

titanmoe/data/shards.py says what is in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titanmoe.data.shards import BLOCK, TOKENIZER, WEIGHTS, WORK, digest_of


def store_tokenizer(folder: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Copies a tokenizer's files into a folder of shards; returns their digests."""
    home = folder / TOKENIZER
    for name, file in files.items():
        home.mkdir(exist_ok=True)
        shutil.copyfile(file, home / name)
    return {name: digest_of(home / name) for name in files}


def write_json(file: Path, value: Any, scratch: Path | None = None) -> None:
    """Completely or not at all; what a kill leaves behind is in `scratch`, or next to it."""
    unfinished = (scratch or file.parent) / f"{file.name}.{os.getpid()}"
    with unfinished.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, file)


class BlockSums:
    """The CRC-32 of every block of a file, as it is written."""

    def __init__(self) -> None:
        self._whole: list[int] = []
        self._crc32, self._room = 0, BLOCK

    def add(self, data: np.ndarray) -> None:
        rest = memoryview(data).cast("B") if data.size else memoryview(b"")
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._crc32, self._room = zlib.crc32(part, self._crc32), self._room - len(part)
            if not self._room:
                self._whole.append(self._crc32)
                self._crc32, self._room = 0, BLOCK

    @property
    def all(self) -> list[int]:
        return [*self._whole, self._crc32] if self._room < BLOCK else self._whole


class ShardWriter:
    """One shard. Its files appear in `folder` once they are complete."""

    FLUSH = 1 << 20

    def __init__(self, folder: Path, name: str, dtype: np.dtype, with_label_mask: bool, with_weights: bool = False):
        self.folder, self.name = folder, name
        self._dtypes = {"tokens": dtype, "counted": np.dtype(np.uint8), "weights": WEIGHTS}
        self.tokens = self.num_labels = self.largest = self._buffered = 0
        extensions = ["tokens", *["counted"] * with_label_mask, *["weights"] * with_weights]
        self._parts: dict[str, list[np.ndarray]] = {extension: [] for extension in extensions}
        self._ends = [0]
        self._crc32, self._sums = dict.fromkeys(self._parts, 0), {extension: BlockSums() for extension in self._parts}
        self._files = {extension: self._unfinished_path(extension).open("wb") for extension in self._parts}

    def add(self, tokens: np.ndarray, weights: np.ndarray | None = None) -> None:
        """A document. weights: how much each token counts as a label, where not all count alike."""
        self._parts["tokens"].append(tokens)
        if weights is not None:
            self._parts["counted"].append(weights > 0)
            self.num_labels += int((weights > 0).sum())
        if "weights" in self._parts:
            self._parts["weights"].append(weights)
        self.tokens += len(tokens)
        self._buffered += len(tokens)
        self._ends.append(self.tokens)
        if self._buffered >= self.FLUSH:
            self._flush()

    def close(self) -> dict[str, Any]:
        """What the manifest says of it."""
        self._flush()
        starts = np.array(self._ends, "<u8")
        self._sums["starts"] = BlockSums()
        self._sums["starts"].add(starts)
        block_sums = [self._sums[name].all for name in ("tokens", "starts", "counted", "weights") if name in self._sums]
        sums = np.concatenate(block_sums).astype("<u4")
        for name, whole in ("starts", starts), ("sums", sums):
            self._files[name] = self._unfinished_path(name).open("wb")
            self._files[name].write(whole)
        self._crc32["starts"] = zlib.crc32(starts)
        for extension, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(self._unfinished_path(extension), self.folder / f"{self.name}.{extension}")
        entry = {"name": self.name, "documents": len(starts) - 1, "tokens": self.tokens, "crc32": self._crc32}
        return entry | {"largest": self.largest, "sums": zlib.crc32(sums)}

    def _flush(self) -> None:
        for extension, parts in self._parts.items():
            dtype = self._dtypes[extension]
            block = np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
            self._files[extension].write(block)
            self._crc32[extension] = zlib.crc32(block, self._crc32[extension])
            self._sums[extension].add(block)
            if extension == "tokens" and block.size:
                self.largest = max(self.largest, int(block.max()))
            parts.clear()
        self._buffered = 0

    def _unfinished_path(self, extension: str) -> Path:
        # One per process: another whose parent was killed may still be writing the same shard.
        return self.folder / WORK / f"{self.name}.{extension}.{os.getpid()}"
