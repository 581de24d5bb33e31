"""A 64-bit digest of a model's weights that is the same under every parallel mapping.

Adapters fit only the frozen weights that they were trained on, and scores beside data shards belong to one model: both
are stored with this digest. It is a sum modulo 2^64 over all elements,

    sum over tensors of  (key(name) | 1) * sum over i of  bits(x_i) * (2 i + 1)

with i the element's index in the full tensor, so ranks add what they hold and any changed bit changes the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanmoe.checkpoint.move_in_blocks import COPY_BLOCK_BYTES, ReadBlock, Sizes, block_slices, split_into_blocks
from titanmoe.checkpoint.on_all_ranks import Group, on_all_ranks
from titanmoe.ops import counter_rng
from titanmoe.parallel.frozen import frozen_dtype
from titanmoe.parallel.materialize import local_shard, row_blocks

INTEGER_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype with the same bits as an element, by its size in bytes."""


def _is_first_copy(parameter: nn.Parameter) -> bool:
    """Return whether this rank is the first that holds the same shard of a DTensor parameter; True for a plain one."""
    if not isinstance(parameter, DTensor):
        return True
    place = parameter.device_mesh.get_coordinate()
    return not any(at for at, kind in zip(place, parameter.placements, strict=True) if isinstance(kind, Replicate))


@torch.no_grad()
def digest_shard(name: str, parameter: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return this rank's summand of a parameter in the digest of a model's weights, not yet reduced modulo 2^64.

    The digest is the sum over all parameters and their shards, each counted on one rank (`combine_digests`).

    Args:
        name: the parameter's name in checkpoints.
        parameter: a plain tensor or a DTensor, of which this rank's local shard is read.
        dtype: dtype to cast the elements to first; None digests them as stored.
    """
    part, offset = local_shard(parameter.detach())
    return _sum_bits(part, offset, parameter.shape, dtype or part.dtype) * (counter_rng.key("base", name) | 1)


def digest_in_blocks(name: str, shape: Sizes, read: ReadBlock, dtype: torch.dtype) -> int:
    """Return a tensor's summand in the digest of a model's weights, not yet reduced modulo 2^64, reading it by blocks.

    Args:
        name: the tensor's name in checkpoints.
        shape: the tensor's shape.
        read: returns a block of the tensor, given its offset and sizes.
        dtype: dtype to cast the elements to first.
    """
    total = 0
    for offset, sizes in split_into_blocks((0,) * len(shape), shape, dtype.itemsize, COPY_BLOCK_BYTES):
        block = read(offset, sizes)
        # for each number, a few of int64
        for at, rows in split_into_blocks(offset, sizes, torch.int64.itemsize, COPY_BLOCK_BYTES // 8):
            total += _sum_bits(block[block_slices(at, rows, offset)], at, shape, dtype)
    return total * (counter_rng.key("base", name) | 1)


def _sum_bits(part: Tensor, offset: Sizes, shape: Sizes, dtype: torch.dtype) -> int:
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for rows, index in row_blocks(part, offset, shape):
        rows = rows.to(dtype).contiguous()
        bits = rows.view(INTEGER_DTYPES[rows.element_size()]).to(torch.int64)
        total += (bits * (2 * index + 1)).sum()
    return int(total)


def frozen_digest(frozen: Mapping[str, nn.Parameter], group: Group) -> str:
    """Return the digest of frozen weights, as 16 hexadecimal digits. Collective over the group.

    A shard that several ranks have counts once.

    Args:
        frozen: the frozen parameters on this rank, by their names in checkpoints.
        group: the ranks that hold the model between them; None for a single process.
    """
    first_copies = {name: parameter for name, parameter in frozen.items() if _is_first_copy(parameter)}
    return combine_digests(group, lambda: sum(digest_shard(*item) for item in first_copies.items()))


def model_digest(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], compute: torch.dtype, group: Group
) -> str:
    """Return the digest of a model in its compute dtypes, as 16 hexadecimal digits. Collective over the group.

    Args:
        parameters: the parameters on this rank, by their names in checkpoints.
        buffers: persistent buffers, full on every rank that has them; each counts once, in its own dtype.
        compute: the dtype of the forward pass; master weights in a wider dtype give the same digest.
        group: the ranks that hold the model between them.
    """

    def local_digest() -> int:
        return sum(
            digest_shard(name, parameter, frozen_dtype(name, compute))
            for name, parameter in parameters.items()
            if _is_first_copy(parameter)
        )

    by_rank = on_all_ranks(group, lambda: {name: digest_shard(name, buffer) for name, buffer in buffers.items()})
    of_buffers = {name: value for some in by_rank for name, value in some.items()}
    return f"{(int(combine_digests(group, local_digest), 16) + sum(of_buffers.values())) % (1 << 64):016x}"


def combine_digests(group: Group, local_digest: Callable[[], int]) -> str:
    """Sum `local_digest()` of all ranks, modulo 2^64, to 16 hexadecimal digits. Collective over the group.

    Raises:
        CheckpointError: on all ranks, if `local_digest` raised one or an OSError on any.
    """
    return f"{sum(on_all_ranks(group, local_digest)) % (1 << 64):016x}"
