"""Adapters of matrices that are parts of one in transformers, such as queries and their gate: PEFT has one for all.

Its A has the rows of ours one below the other, and its B is zero where one would reach another's outputs. Of n ranks r
it has the rank n r, and with n times the alpha it computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from titanmoe.checkpoint.hf.tensor_map import TensorMap


def fused_matrices(map_: TensorMap, name: str) -> list[str]:
    """Our matrices in the tensor that a matrix is in: itself alone, unless it is part of a larger one."""
    place = map_.places[name][0]
    return [name] if place.home.part is None else [part.our_name for part in map_.parts[place.hf_name]]


def rows_in_fused(map_: TensorMap, name: str) -> Tensor:
    return map_.rows(map_.places[name][0].home, 0, map_.our_shapes[name][0])


def fuse_adapters(
    pairs: Iterable[tuple[Tensor, Tensor]], rows: Iterable[Tensor], outputs: int
) -> tuple[Tensor, Tensor]:
    """A and B of all, from those of each and the rows that it has there."""
    downs, ups = zip(*pairs, strict=True)
    down, begin = torch.cat(downs), 0
    up = ups[0].new_zeros(outputs, len(down))
    for own, row in zip(ups, rows, strict=True):
        up[row, begin : begin + own.shape[1]] = own
        begin += own.shape[1]
    return down, up


def split_fused_adapters(down: Tensor, up: Tensor, rows: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each whose outputs B reaches, or of all if it reaches none. If it is not zero where one would reach
    another's, all have the same A."""
    ups = {name: up[row] for name, row in rows.items()}
    ups = {name: own for name, own in ups.items() if own.any()} or ups
    rank, rest = divmod(len(down), len(ups))
    columns = {name: slice(rank * i, rank * (i + 1)) for i, name in enumerate(ups)}
    others = (own.clone().index_fill_(1, torch.arange(len(down))[columns[name]], 0) for name, own in ups.items())
    if rest or any(other.any() for other in others):
        return {name: (down, own) for name, own in ups.items()}
    return {name: (down[columns[name]], own[:, columns[name]]) for name, own in ups.items()}
