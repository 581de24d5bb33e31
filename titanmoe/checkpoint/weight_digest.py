"""A number for a model's weights, the same under every mapping: adapters only fit the frozen weights that they were
trained on, and scores are those of one model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanmoe.checkpoint.move_in_blocks import COPY_BLOCK_BYTES, ReadBlock, Sizes, block_slices, split_into_blocks
from titanmoe.checkpoint.on_all_ranks import Group, on_all_ranks
from titanmoe.ops import counter_rng
from titanmoe.parallel.frozen import held_dtype
from titanmoe.parallel.materialize import blocks_of, local_shard

INTEGER_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_first_copy(parameter: nn.Parameter) -> bool:
    """Whether no rank before this one in the stage has the same shard."""
    if not isinstance(parameter, DTensor):
        return True
    place = parameter.device_mesh.get_coordinate()
    return not any(at for at, kind in zip(place, parameter.placements, strict=True) if isinstance(kind, Replicate))


@torch.no_grad()
def digest_shard(name: str, parameter: Tensor, dtype: torch.dtype | None = None) -> int:
    """Of all numbers' bits, each times an odd number that belongs to its place, so that one changed bit changes it.
    dtype: as which they are taken, if not as they are stored."""
    part, offset = local_shard(parameter.detach())
    return _sum(part, offset, parameter.shape, dtype or part.dtype) * (counter_rng.key("base", name) | 1)


def digest_in_blocks(name: str, shape: Sizes, read: ReadBlock, dtype: torch.dtype) -> int:
    """The same of a tensor that is read block by block."""
    total = 0
    for offset, sizes in split_into_blocks((0,) * len(shape), shape, dtype.itemsize, COPY_BLOCK_BYTES):
        block = read(offset, sizes)
        for at, rows in split_into_blocks(
            offset, sizes, torch.int64.itemsize, COPY_BLOCK_BYTES // 8
        ):  # for each number, a few of int64
            total += _sum(block[block_slices(at, rows, offset)], at, shape, dtype)
    return total * (counter_rng.key("base", name) | 1)


def _sum(part: Tensor, offset: Sizes, shape: Sizes, dtype: torch.dtype) -> int:
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for rows, index in blocks_of(part, offset, shape):
        rows = rows.to(dtype).contiguous()
        bits = rows.view(INTEGER_DTYPES[rows.element_size()]).to(torch.int64)
        total += (bits * (2 * index + 1)).sum()
    return int(total)


def frozen_digest(frozen: Mapping[str, nn.Parameter], group: Group) -> str:
    """All ranks call it together, with what they hold. frozen: by their names in checkpoints."""

    def mine() -> int:
        return sum(digest_shard(name, parameter) for name, parameter in frozen.items() if _is_first_copy(parameter))

    return combine_digests(group, mine)


def model_digest(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], compute: torch.dtype, group: Group
) -> str:
    """Of a model as it computes, whether its weights are stored as wide or wider. All ranks call it together.

    parameters: by their names in checkpoints. buffers: whole on every rank that has them."""

    def mine() -> int:
        return sum(
            digest_shard(name, parameter, held_dtype(name, compute))
            for name, parameter in parameters.items()
            if _is_first_copy(parameter)
        )

    by_rank = on_all_ranks(group, lambda: {name: digest_shard(name, buffer) for name, buffer in buffers.items()})
    of_buffers = {name: value for some in by_rank for name, value in some.items()}
    return f"{(int(combine_digests(group, mine), 16) + sum(of_buffers.values())) % (1 << 64):016x}"


def combine_digests(group: Group, mine: Callable[[], int]) -> str:
    """The digest from the numbers of which each rank has some."""
    return f"{sum(on_all_ranks(group, mine)) % (1 << 64):016x}"
