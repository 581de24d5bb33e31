"""Allocate and initialise weights: each rank computes only its shards, with the same values under every mapping.

Element i of a weight is a function of the seed, the weight's name and i (titanmoe.ops.counter_rng), so no rank needs
the full weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanmoe.models.tensors import stored_name
from titanmoe.models.transformer import Transformer
from titanmoe.ops import counter_rng

INTO_RESIDUAL = ("wo.weight", "w2.weight", "w2")
"""Suffixes of weights that write to the residual stream, and begin smaller by sqrt(2 * num_layers)."""


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of a tensor, as a plain tensor, and the index of its first element in each full dim.

    The shard shares the tensor's memory; a tensor that is no DTensor is its own shard.

    Raises:
        RuntimeError: if torch gives the shard another shape than its region has.
    """
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = tensor.to_local()
    if tuple(part.shape) != tuple(shape):
        raise RuntimeError(
            f"a shard has shape {tuple(part.shape)}, but its region of the full tensor has {tuple(shape)}"
        )
    return part, tuple(offset)


@torch.no_grad()
def materialize(model: Transformer, seed: int, device: torch.device) -> None:
    """Allocate a stage that is on meta, zero its buffers and initialise its weights, in place. No communication.

    Weights are filled by the function that their module has for them in `initial`, given (key of the random numbers,
    indices of elements in the full weight, dtype), which returns the values of these elements. Else norms get ones,
    biases zeros, all others normal numbers of the standard deviation model.init_std, which is divided by
    sqrt(2 * num_layers) for weights that write to the residual stream.

    Args:
        model: the stage, with its tensors on meta.
        seed: the seed of the weights: equal ones make equal full weights under every mapping.
    """
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    initial = {
        f"{path}.{name}": values
        for path, module in model.named_modules()
        for name, values in getattr(module, "initial", {}).items()
    }
    for name, parameter in model.named_parameters():
        part, offset = local_shard(parameter)
        if name in initial:
            key = counter_rng.key("weight", seed, name)
            for rows, index in row_blocks(part, offset, parameter.shape):
                rows.copy_(initial[name](key, index, torch.promote_types(part.dtype, model.dtype)))
        elif name.endswith("norm.weight"):
            part.fill_(1)
        elif name.endswith("bias"):
            part.zero_()
        else:
            name = stored_name(name, model.shape.tie_embeddings)
            std = model.shape.init_std
            if name.endswith(INTO_RESIDUAL):
                std /= math.sqrt(2 * model.shape.num_layers)
            # A frozen weight, which is narrower, begins with the bits that a trained one is computed with.
            wide = torch.promote_types(part.dtype, model.dtype)
            fill_normal(part, offset, parameter.shape, counter_rng.key("weight", seed, name), std, wide)


def fill_normal(
    shard: Tensor, offset: tuple[int, ...], shape: torch.Size, key: int, std: float, dtype: torch.dtype | None = None
) -> None:
    """Fill a shard with normal values: element i of the full tensor (row-major) is std * counter_rng.normal(key, i).

    Args:
        shard: this rank's shard, which is overwritten.
        offset: index of the shard's first element in each dim of the full tensor.
        shape: shape of the full tensor.
        dtype: dtype to compute in; None for that of the shard.
    """
    for rows, index in row_blocks(shard, offset, shape):
        rows.copy_(counter_rng.normal(key, index, dtype or shard.dtype) * std)


def row_blocks(shard: Tensor, offset: tuple[int, ...], shape: torch.Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (block of consecutive rows of a shard, index of each of its elements in the full tensor, row-major).

    A block is a view. Blocks limit the memory of the indices.

    Args:
        offset: index of the shard's first element in each dim of the full tensor.
        shape: shape of the full tensor.
    """
    if shard.numel() == 0:
        return
    index = torch.zeros((), dtype=torch.int64, device=shard.device)
    for start, length, size in zip(offset[1:], shard.shape[1:], shape[1:], strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(start, start + length, device=shard.device)
    stride, rows = math.prod(shape[1:]), max(1, (1 << 24) // max(1, index.numel()))
    for first in range(0, shard.shape[0], rows):
        row = torch.arange(first, min(first + rows, shard.shape[0]), device=shard.device) + offset[0]
        yield shard[first : first + len(row)], row.view(-1, *[1] * index.dim()) * stride + index
