"""Writing of token shards: each file complete and with its checksums, and the tokenizer beside them.

titanmoe/data/token_shards.py describes the folder.
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

from titanmoe.data.token_shards import BLOCK, TOKENIZER, WEIGHTS, WORK, digest_file


def store_tokenizer(folder: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Copy a tokenizer's files to the subfolder TOKENIZER of token shards, and return the digest of each by name."""
    home = folder / TOKENIZER
    for name, file in files.items():
        home.mkdir(exist_ok=True)
        shutil.copyfile(file, home / name)
    return {name: digest_file(home / name) for name in files}


def write_json(file: Path, value: Any, scratch: Path | None = None) -> None:
    """Write a JSON file atomically: into a temporary file, synced to disk and renamed.

    `scratch` is a folder on the same disk for the temporary file, which stays there if the process is killed; None for
    the file's own folder.
    """
    unfinished = (scratch or file.parent) / f"{file.name}.{os.getpid()}"
    with unfinished.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, file)


class BlockSums:
    """Running CRC-32 of every block of `BLOCK` bytes of a file that is being written."""

    def __init__(self) -> None:
        self._full_blocks: list[int] = []
        self._crc32, self._room = 0, BLOCK

    def add(self, data: np.ndarray) -> None:
        """Include the next bytes of the file in the checksums."""
        rest = memoryview(data).cast("B") if data.size else memoryview(b"")
        while rest:
            chunk, rest = rest[: self._room], rest[self._room :]
            self._crc32, self._room = zlib.crc32(chunk, self._crc32), self._room - len(chunk)
            if not self._room:
                self._full_blocks.append(self._crc32)
                self._crc32, self._room = 0, BLOCK

    @property
    def all(self) -> list[int]:
        """CRC-32 of each block so far; the last block may be incomplete."""
        return [*self._full_blocks, self._crc32] if self._room < BLOCK else self._full_blocks


class ShardWriter:
    """Writer of one token shard. Its files appear in `folder` when `close` has completed them.

    Args:
        folder: folder of the shards, with a subfolder "work" for unfinished files.
        name: name of the shard's files, without extension.
        dtype: dtype of token ids in the file.
        with_label_mask: whether to store which tokens are labels.
        with_weights: whether to store the weight of each label; needs the label mask.
    """

    FLUSH = 1 << 20

    def __init__(self, folder: Path, name: str, dtype: np.dtype, with_label_mask: bool, with_weights: bool = False):
        self.folder, self.name = folder, name
        self._dtypes = {"tokens": dtype, "counted": np.dtype(np.uint8), "weights": WEIGHTS}
        self.tokens = self.num_labels = self.largest = self._buffered = 0
        extensions = ["tokens", *["counted"] * with_label_mask, *["weights"] * with_weights]
        self._buffers: dict[str, list[np.ndarray]] = {extension: [] for extension in extensions}
        self._ends = [0]
        self._crc32 = dict.fromkeys(extensions, 0)
        self._sums = {extension: BlockSums() for extension in extensions}
        self._files = {extension: self._unfinished_path(extension).open("wb") for extension in self._buffers}

    def add(self, tokens: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Append a document to the shard, with the weight of each token as a label if the shard has a label mask.

        A token is a label if its weight is above 0; the weight itself is stored only if the shard is `with_weights`.

        Raises:
            ValueError: `weights` is given for a shard without a label mask, or None for one that has a mask.
        """
        if (weights is None) == ("counted" in self._buffers):
            has = "has a label mask, and a document came without" if weights is None else "has no label mask for these"
            raise ValueError(f"shard {self.name} {has} label weights")
        self._buffers["tokens"].append(tokens)
        if weights is not None:
            self._buffers["counted"].append(weights > 0)
            self.num_labels += int((weights > 0).sum())
        if "weights" in self._buffers:
            self._buffers["weights"].append(weights)
        self.tokens += len(tokens)
        self._buffered += len(tokens)
        self._ends.append(self.tokens)
        if self._buffered >= self.FLUSH:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Complete the shard's files, sync and rename them, and return the shard's entry in the manifest.

        The files of document starts and of checksums are written here. The entry does not have the number of labels.
        """
        self._flush()
        starts = np.array(self._ends, "<u8")
        self._sums["starts"] = BlockSums()
        self._sums["starts"].add(starts)
        block_sums = [self._sums[name].all for name in ("tokens", "starts", "counted", "weights") if name in self._sums]
        sums = np.concatenate(block_sums).astype("<u4")
        for name, data in ("starts", starts), ("sums", sums):
            self._files[name] = self._unfinished_path(name).open("wb")
            self._files[name].write(data)
        self._crc32["starts"] = zlib.crc32(starts)
        for extension, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(self._unfinished_path(extension), self.folder / f"{self.name}.{extension}")
        entry = {"name": self.name, "documents": len(starts) - 1, "tokens": self.tokens, "crc32": self._crc32}
        return entry | {"largest": self.largest, "sums": zlib.crc32(sums)}

    def _flush(self) -> None:
        """Write the buffered documents to the files; update the checksums and `largest`, the largest token id."""
        for extension, buffer in self._buffers.items():
            dtype = self._dtypes[extension]
            block = np.concatenate(buffer).astype(dtype) if buffer else np.empty(0, dtype)
            self._files[extension].write(block)
            self._crc32[extension] = zlib.crc32(block, self._crc32[extension])
            self._sums[extension].add(block)
            if extension == "tokens" and block.size:
                self.largest = max(self.largest, int(block.max()))
            buffer.clear()
        self._buffered = 0

    def _unfinished_path(self, extension: str) -> Path:
        # One per process: another whose parent was killed may still be writing the same shard.
        return self.folder / WORK / f"{self.name}.{extension}.{os.getpid()}"
