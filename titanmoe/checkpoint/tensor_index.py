"""tensors.json: which tensors a checkpoint has, and where in which file their blocks are.

    {"model.a": {"dtype": "float32", "shape": [2, 3], "blocks": [[[0, 0], [2, 3], "rank-00000-000.distcp", 0, 1321]]}}

A block: offset in the tensor, shape, file, first byte, bytes; what is there was written by torch.save.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import add, mul
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from titanmoe.checkpoint.manifest import Checksum
from titanmoe.checkpoint.move_in_blocks import COPY_BLOCK_BYTES, Sizes, empty
from titanmoe.checkpoint.saved_tensor import MOST_BYTES, read_saved_tensor

TENSOR_INDEX = "tensors.json"
MOST_DIMS = 64
"""Most dims of a tensor of torch."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class StoredBlock:
    """A block of a tensor and the bytes of a file that torch.save wrote it to."""

    offset: Sizes
    shape: Sizes
    file: str
    start: int
    bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint and the blocks that make it up."""

    dtype: torch.dtype
    shape: Sizes
    blocks: tuple[StoredBlock, ...]


def to_json(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Return the contents of tensors.json for a checkpoint's tensors, with one line for each tensor."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        blocks = [[b.offset, b.shape, b.file, b.start, b.bytes] for b in tensor.blocks]
        entry = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tensor.shape, "blocks": blocks}
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def parse_entries(entries: Mapping[str, Any], files: Mapping[str, Checksum]) -> dict[str, StoredTensor]:
    """Return the tensors that the entries of a tensors.json describe, checked against the sizes of the files.

    Args:
        entries: dicts with "dtype", "shape" and "blocks", by tensor name.
        files: size and CRC-32 of the checkpoint's files, by name.

    Raises:
        ValueError, KeyError, TypeError: blocks do not make up a tensor, overlap, or are not within their file.
    """
    tensors = {name: _tensor(name, entry, files) for name, entry in entries.items()}
    # This guarantees that all tensors together are no larger than the files.
    ranges = sorted((b.file, b.start, b.bytes) for tensor in tensors.values() for b in tensor.blocks)
    for (file, start, length), (other, after, _) in pairwise(ranges):
        if file == other and after < start + length:
            raise ValueError(f"two blocks share byte {after} of {file}")
    return tensors


def _tensor(name: str, entry: dict[str, Any], files: Mapping[str, Checksum]) -> StoredTensor:
    dtype, shape = DTYPES.get(entry["dtype"]), _sizes(entry["shape"])
    if dtype is None:
        raise ValueError(f"{name} has dtype {entry['dtype']!r}")
    blocks = tuple(_block(name, block, shape, dtype, files) for block in entry["blocks"])
    if sum(prod(block.shape) for block in blocks) != prod(shape):
        raise ValueError(f"the blocks of {name} do not make up its shape {shape}")
    return StoredTensor(dtype, shape, blocks)


def _block(
    name: str, entry: list[Any], full_shape: Sizes, dtype: torch.dtype, files: Mapping[str, Checksum]
) -> StoredBlock:
    offset, shape, file, start, length = entry
    block = StoredBlock(_sizes(offset), _sizes(shape), file, *_sizes([start, length]))
    if not len(block.offset) == len(block.shape) == len(full_shape) or any(
        first + n > all_ for first, n, all_ in zip(block.offset, block.shape, full_shape, strict=True)
    ):
        raise ValueError(f"a block of {name} at {block.offset} with shape {block.shape} is not within {full_shape}")
    if block.file not in files or block.start + block.bytes > files[block.file].bytes:
        raise ValueError(f"{name} is in {block.file!r} up to byte {start + length}, which that file does not have")
    if prod(block.shape) * dtype.itemsize > block.bytes:
        raise ValueError(f"a block of {name} with shape {block.shape} is larger than its {block.bytes} bytes")
    return block


def _sizes(values: Any) -> Sizes:
    """Return a list as a tuple of sizes; ValueError unless it has at most 64 integers, from 0 to below 2^63."""
    if not isinstance(values, list | tuple) or len(values) > MOST_DIMS or any(map(_is_no_size, values)):
        raise ValueError(f"{values!r:.60} are not sizes")
    return tuple(values)


def _is_no_size(value: Any) -> bool:
    return type(value) is not int or not 0 <= value < 1 << 63


class _BlockFile(io.RawIOBase):
    """A read-only file object over the bytes of one block."""

    def __init__(self, file: BinaryIO, block: StoredBlock):
        super().__init__()
        self.file, self.start, self.size, self.at = file, block.start, block.bytes, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        if at < 0:
            raise ValueError("the file is truncated")
        self.at = at
        return at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes, or all that are left; ValueError if either is more than MOST_BYTES."""
        size = self.size - self.at if size < 0 else size
        if size > MOST_BYTES:
            raise ValueError(f"the list of files has {size:,} bytes, and the limit is {MOST_BYTES:,}")
        return super().read(size)

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.at)
        done = self.file.readinto(memoryview(buffer)[: max(self.size - self.at, 0)])
        self.at += done
        return done


class StridedData(NamedTuple):
    """The location in a file of a tensor's elements: first byte, strides in elements, dtype."""

    start: int
    """Position of the first element's first byte."""
    strides: Sizes
    dtype: torch.dtype

    def read(self, file: BinaryIO, offset: Sizes, sizes: Sizes) -> Tensor:
        """Return a block of the tensor, not empty, read from an open file; it may be a strided view.

        It reads all bytes from the block's first element to its last, or splits the block if most of them are not the
        block's.

        Args:
            file: the open file.
            offset: where the block begins in the tensor.
            sizes: the block's shape.

        Raises:
            ValueError: the file ends before the block does.
        """
        first, last = self._flat_index(offset), self._flat_index(tuple(map(add, offset, [n - 1 for n in sizes])))
        length = 1 + last - first
        if length > 2 * prod(sizes) and length * self.dtype.itemsize > COPY_BLOCK_BYTES:
            return self._read_split(file, offset, sizes)
        data = empty((length,), self.dtype)
        file.seek(self.start + first * self.dtype.itemsize)
        if file.readinto(data.view(torch.uint8).numpy()) != data.nbytes:
            raise ValueError("the file is truncated")
        return data.as_strided(sizes, self.strides)

    def _read_split(self, file: BinaryIO, offset: Sizes, sizes: Sizes) -> Tensor:
        dim = next(dim for dim, n in enumerate(sizes) if n > 1)
        first, out = sizes[dim] // 2, empty(sizes, self.dtype)
        for start, n in ((0, first), (first, sizes[dim] - first)):
            at = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
            out.narrow(dim, start, n).copy_(self.read(file, at, (*sizes[:dim], n, *sizes[dim + 1 :])))
        return out

    def _flat_index(self, indices: Sizes) -> int:
        return sum(map(mul, indices, self.strides))

    def end(self, shape: Sizes) -> int:
        """Return the position in the file after the last byte of the tensor, given its shape, which is not empty."""
        return self.start + (1 + self._flat_index(tuple(n - 1 for n in shape))) * self.dtype.itemsize


def locate_data(block: StoredBlock, dtype: torch.dtype, file: BinaryIO) -> StridedData:
    """Return where in its file, which is open, the elements of a stored block are.

    Raises:
        ValueError: the file does not have a tensor of the block's shape and this dtype there.
    """
    saved = read_saved_tensor(_BlockFile(file, block))
    if (saved.shape, saved.dtype) != (block.shape, dtype):
        described = f"{TENSOR_INDEX} says {block.shape} of {dtype}"
        raise ValueError(f"a block is {saved.shape} of {saved.dtype}, and {described}")
    numbers = StridedData(block.start + saved.start, saved.strides, dtype)
    if numbers.end(block.shape) > block.start + min(saved.end, block.bytes):
        raise ValueError(f"the numbers of a block do not fit into {block.bytes:,} bytes")
    return numbers


def intersection(block: StoredBlock, offset: Sizes, sizes: Sizes) -> tuple[Sizes, Sizes] | None:
    """Return the overlap of a stored block with a shard as offset in the full tensor and sizes; None if empty.

    `offset` is where the shard begins in the full tensor, `sizes` its shape.
    """
    starts, common = [], []
    for a, n, b, m in zip(block.offset, block.shape, offset, sizes, strict=True):
        starts.append(max(a, b))
        common.append(min(a + n, b + m) - starts[-1])
        if common[-1] <= 0:
            return None
    return tuple(starts), tuple(common)


def blocks_covering(stored: StoredTensor | None, full_shape: Sizes, offset: Sizes, sizes: Sizes) -> list[StoredBlock]:
    """Return the stored blocks that overlap with a shard.

    Args:
        stored: the stored tensor; None if the checkpoint has no tensor of that name.
        full_shape: shape of the full tensor that the shard belongs to.
        offset: where the shard begins in the full tensor.
        sizes: the shard's shape.

    Raises:
        ValueError: there is no such tensor, its shape is not `full_shape`, or blocks overlap or do not cover the shard.
    """
    if stored is None:
        raise ValueError("is not stored")
    if stored.shape != full_shape:
        raise ValueError(f"has shape {stored.shape}, and {full_shape} is needed")
    common = {block: part for block in stored.blocks if (part := intersection(block, offset, sizes)) is not None}
    if sum(prod(part_sizes) for _, part_sizes in common.values()) != prod(sizes):
        raise ValueError("is not covered by the stored blocks, or some overlap")
    return list(common)
