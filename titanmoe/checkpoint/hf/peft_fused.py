"""Adapters of weights that transformers fuses in one matrix, such as queries and their gate: PEFT has one for all.

Merging n adapters of rank r gives one of rank n * r: its A stacks the rows of theirs, and its B is block diagonal, zero
where one adapter would reach another's outputs. With n times the alpha it computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from titanmoe.checkpoint.hf.tensor_map import TensorMap


def fused_matrices(map_: TensorMap, name: str) -> list[str]:
    """Return our names of all weights that are stored in the same Hugging Face tensor as `name`, itself included."""
    place = map_.places[name][0]
    return [name] if place.hf_tensor.fused is None else [part.our_name for part in map_.parts[place.hf_name]]


def rows_in_fused(map_: TensorMap, name: str) -> Tensor:
    """Return, for each row of our weight `name`, its row number in the Hugging Face tensor that fuses weights."""
    return map_.rows(map_.places[name][0].hf_tensor, 0, map_.our_shapes[name][0])


def fuse_adapters(
    pairs: Iterable[tuple[Tensor, Tensor]], rows: Iterable[Tensor], outputs: int
) -> tuple[Tensor, Tensor]:
    """Merge the adapters of several weights into A and B of the one matrix that transformers fuses them in.

    With R the sum of the weights' ranks, A is (R, inputs) and B (outputs, R).

    Args:
        pairs: A (r, inputs) and B (outputs, r) of each weight.
        rows: the row numbers of each weight in the fused matrix.
        outputs: number of rows of the fused matrix.
    """
    downs, ups = zip(*pairs, strict=True)
    down, begin = torch.cat(downs), 0
    up = ups[0].new_zeros(outputs, len(down))
    for block, row in zip(ups, rows, strict=True):
        up[row, begin : begin + block.shape[1]] = block
        begin += block.shape[1]
    return down, up


def split_fused_adapters(down: Tensor, up: Tensor, rows: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Split the adapter of a fused matrix into A and B of each weight in it, by name.

    Weights for whose rows B is zero are left out, unless B is zero for all. If B is block diagonal each gets a slice of
    the rows of A, in the order of `rows`; otherwise all get the full A.

    Args:
        down: A of the fused matrix.
        up: B of the fused matrix.
        rows: the row numbers of each weight in the fused matrix, by the weight's name.
    """
    ups = {name: up[row] for name, row in rows.items()}
    ups = {name: block for name, block in ups.items() if block.any()} or ups
    rank, rest = divmod(len(down), len(ups))
    columns = {name: slice(rank * i, rank * (i + 1)) for i, name in enumerate(ups)}
    others = (block.clone().index_fill_(1, torch.arange(len(down))[columns[name]], 0) for name, block in ups.items())
    if rest or any(other.any() for other in others):
        return {name: (down, block) for name, block in ups.items()}
    return {name: (down[columns[name]], block[:, columns[name]]) for name, block in ups.items()}
