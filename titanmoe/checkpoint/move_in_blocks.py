"""Large tensors are moved block by block, so that memory does not grow with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from mmap import MAP_PRIVATE, mmap
from operator import add

import torch
from torch import Tensor

Sizes = tuple[int, ...]
ReadBlock = Callable[[Sizes, Sizes], Tensor]
"""Reads a block of a tensor: offset, sizes."""
WRITE_BLOCK_BYTES = 32 << 20
"""Bytes of a block that is written at once, at most."""
COPY_BLOCK_BYTES = 2 << 20
"""Of one that is only on its way to another place in memory."""


def split_into_blocks(offset: Sizes, sizes: Sizes, itemsize: int, most: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Offsets and sizes of blocks of at most so many bytes, which one after the other are a block of a tensor, in the
    order of its numbers. Rows of the last dim stay whole."""
    if not prod(sizes):
        return
    if prod(sizes) * itemsize <= most:
        yield offset, sizes
        return
    last = max(len(sizes) - 2, 0)
    dim = next((d for d in range(last) if prod(sizes[d + 1 :]) * itemsize <= most), last)
    rest = sizes[dim + 1 :]
    step = max(1, most // (prod(rest) * itemsize))
    for outer in product(*map(range, sizes[:dim])):
        for first in range(0, sizes[dim], step):
            start = (*outer, first, *[0] * len(rest))
            yield tuple(map(add, offset, start)), (*[1] * dim, min(step, sizes[dim] - first), *rest)


def block_slices(offset: Sizes, sizes: Sizes, start: Sizes | None = None) -> tuple[slice, ...]:
    """Where a block is in a tensor, or in a larger block that begins at start."""
    at = [first - begin for first, begin in zip(offset, start or (0,) * len(offset), strict=True)]
    return tuple(slice(first, first + n) for first, n in zip(at, sizes, strict=True))


def slice_of_full(make: Callable[[], Tensor]) -> ReadBlock:
    """Of a tensor that is only made whole."""
    return lambda offset, sizes: make()[block_slices(offset, sizes)]


def empty(sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """Memory that is the system's again once it is released: malloc keeps what it had, in pieces that are too small for
    the next block."""
    size = prod(sizes) * dtype.itemsize
    if size < COPY_BLOCK_BYTES // 4:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(mmap(-1, size, MAP_PRIVATE), dtype=dtype).view(sizes)


def fill_in_blocks(out: Tensor, offset: Sizes, read: ReadBlock) -> Tensor:
    """out: the block of a tensor that begins at offset, in whatever dtype and on whatever device."""
    for at, sizes in split_into_blocks(offset, tuple(out.shape), out.itemsize, COPY_BLOCK_BYTES):
        out[block_slices(at, sizes, offset)].copy_(read(at, sizes))
    return out
