"""Move large tensors block by block, so that memory does not grow with them. A block is an offset and sizes.

Called by all that reads, writes or converts checkpoints. A tensor is a function that returns any block of it, so full
tensors are made only where a transformation needs one.
"""

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
"""A function (offset, sizes) that returns a block of a tensor."""
CPU = torch.device("cpu")
WRITE_BLOCK_BYTES = 32 << 20
"""Most bytes of a block that is written to a file at once."""
COPY_BLOCK_BYTES = 2 << 20
"""Most bytes of a block that is copied within memory."""


def split_into_blocks(offset: Sizes, sizes: Sizes, itemsize: int, most: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Yield (offset in the tensor, sizes) of small blocks that make up a block, in row-major order; none if empty.

    Args:
        offset: where the block to split begins in its tensor.
        sizes: shape of the block to split.
        itemsize: bytes of an element.
        most: most bytes of a yielded block. The last of several dims is not split: a longer row is a block of its own.
    """
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
    """Return the slices that index a block in its tensor, or in a larger block of that tensor.

    Args:
        offset: where the block begins in the tensor.
        sizes: the block's shape.
        start: where the larger block begins in the tensor; None to index the tensor itself.
    """
    at = [first - begin for first, begin in zip(offset, start or (0,) * len(offset), strict=True)]
    return tuple(slice(first, first + n) for first, n in zip(at, sizes, strict=True))


def slice_of_full(make: Callable[[], Tensor]) -> ReadBlock:
    """Return a function (offset, sizes) that reads a block of a tensor: each call makes it in full and slices it."""
    return lambda offset, sizes: make()[block_slices(offset, sizes)]


def empty(sizes: Sizes, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return an uninitialised tensor; on the CPU its memory goes back to the system once it is released.

    Large ones are mapped anonymously: malloc would keep freed memory in fragments too small for the next block.
    """
    size = prod(sizes) * dtype.itemsize
    if size < COPY_BLOCK_BYTES // 4 or device != CPU:
        return torch.empty(sizes, dtype=dtype, device=device)
    return torch.frombuffer(mmap(-1, size, MAP_PRIVATE), dtype=dtype).view(sizes)


def fill_in_blocks(out: Tensor, offset: Sizes, read: ReadBlock) -> Tensor:
    """Fill `out`, which is a block of a larger tensor, in place from smaller blocks, and return it.

    Args:
        out: the block to fill, of any dtype and device: what `read` returns is converted as it is copied.
        offset: where `out` begins in the larger tensor.
        read: returns a block of the larger tensor, given its offset and sizes.
    """
    for at, sizes in split_into_blocks(offset, tuple(out.shape), out.itemsize, COPY_BLOCK_BYTES):
        out[block_slices(at, sizes, offset)].copy_(read(at, sizes))
    return out
