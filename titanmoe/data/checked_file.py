"""Memory-mapped files of token shards and of stored scores, whose blocks have checksums."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titanmoe.config import ConfigError

BLOCK = 1 << 16
"""Bytes that are checked together: some eight samples of 4,096 tokens, checked in 20 us."""


def map_file(file: Path, dtype: np.dtype, writable: bool = False) -> np.ndarray:
    """Return a file as a memory-mapped 1-dim array of `dtype`; changes stay in memory unless it is `writable`."""
    import torch

    # Each map of numpy or Python keeps a file open, and a process may only have about a thousand.
    data = torch.from_file(str(file), shared=writable, size=file.stat().st_size, dtype=torch.uint8)
    return data.numpy().view(dtype)


class CheckedFile:
    """A memory-mapped file whose blocks are each compared with their CRC-32 when they are first read.

    Args:
        file: path of the file.
        dtype: dtype of its items.
        crc32s: CRC-32 of each block; None to compare nothing, as in older folders.
        advice: end of the message about a changed block.
        block: bytes of a block.
    """

    def __init__(
        self, file: Path, dtype: np.dtype, crc32s: Sequence[int] | np.ndarray | None, advice: str, block: int = BLOCK
    ):
        self.file, self.crc32s, self.advice, self.block = file, crc32s, advice, block
        self.items = map_file(file, dtype)
        self._is_checked = np.zeros(0 if crc32s is None else len(crc32s), bool)

    def read(self, items: slice | np.ndarray) -> np.ndarray:
        """Return items by their indices, after checking each of their blocks that is read for the first time.

        An array of indices is for items none of which lies in two blocks.

        Raises:
            ConfigError: a block differs from its checksum.
        """
        if self.crc32s is not None:
            size = self.items.itemsize
            if isinstance(items, slice):
                touched = np.arange(items.start * size // self.block, -(-items.stop * size // self.block))
            else:
                touched = np.unique(items * size // self.block)
            for block in touched[~self._is_checked[touched]].tolist():
                if where := self._changed_range(block):
                    raise ConfigError(f"{self.file} has changed since it was written, {where}: {self.advice}")
                self._is_checked[block] = True
        return self.items[items]

    def first_changed_range(self) -> str:
        """Return where the file first differs from its checksums, such as ", first between bytes 0 and 65,536".

        Reads it from the start, blocks that were checked before too. "" if it differs nowhere or has no checksums.
        """
        ranges = (self._changed_range(block) for block in range(len(self._is_checked)))
        return next((f", first {where}" for where in ranges if where), "")

    def _changed_range(self, block: int) -> str:
        """Return the byte range of a block as text if it differs from its checksum; else ""."""
        first = block * self.block
        data = self.items.view(np.uint8)[first : first + self.block]
        is_equal = zlib.crc32(data) == self.crc32s[block]
        return "" if is_equal else f"between bytes {first:,} and {first + len(data):,}"
