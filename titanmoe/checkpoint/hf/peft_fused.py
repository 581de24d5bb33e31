"""Convert adapters of weights that transformers has in one parameter: PEFT has one adapter for all of them.

Merging n adapters of rank r gives one of rank n * r: its A stacks the rows of theirs, and its B is block diagonal, zero
where one adapter would reach another's outputs. With n times the alpha it computes the same. This is how queries are
fused with their gate, and gate with up of stacked experts (`target_parameters`), of which PEFT's A is (experts * r,
inputs), one expert after the other, and its B (outputs, r * experts), with the experts next to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from titanmoe.checkpoint.hf.tensor_map import TensorMap

Rows = Tensor | slice
"""The row numbers of a weight in the parameter that fuses it with others."""


class AdapterPair(NamedTuple):
    """The adapter of one weight, or the adapters of one weight of all experts."""

    down: Tensor
    """A: (r, inputs) or (experts, r, inputs)."""
    up: Tensor
    """B: (outputs, r) or (experts, outputs, r)."""

    def to_peft(self) -> AdapterPair:
        """Return A and B of experts in the shapes of PEFT's files: (experts * r, inputs) and (outputs, r * experts)."""
        return AdapterPair(self.down.flatten(0, 1), self.up.permute(1, 2, 0).flatten(1))

    def widened(self, rank: int) -> AdapterPair:
        """Return adapters of a larger rank that compute the same: A and B padded with zeros."""
        more = rank - self.down.shape[-2]
        if not more:
            return self
        return AdapterPair(functional.pad(self.down, (0, 0, 0, more)), functional.pad(self.up, (0, more)))


def from_peft(down: Tensor, up: Tensor, experts: int) -> AdapterPair:
    """Return A (experts, r, inputs) and B (experts, outputs, r), from A and B in the shapes of PEFT's files.

    Those are (experts * r, inputs) and (outputs, r * experts).
    """
    return AdapterPair(down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).permute(2, 0, 1))


def fused_matrices(map_: TensorMap, name: str) -> list[str]:
    """Return our names of all weights that are rows of the same fused Hugging Face tensor as `name`, itself included.

    [name] for other tensors, also for stacked experts whose gate and up alternate.
    """
    place = map_.places[name][0]
    return [name] if place.hf_tensor.fused is None else [part.our_name for part in map_.parts[place.hf_name]]


def rows_in_fused(map_: TensorMap, name: str) -> Tensor:
    """Return, for each row of our weight `name`, its row number in the Hugging Face tensor that fuses weights."""
    return map_.rows(map_.places[name][0].hf_tensor, 0, map_.our_shapes[name][0])


def gate_up_rows(outputs: int, interleaved: bool) -> tuple[slice, slice]:
    """Return the rows of gate, then of up, in the weight of `outputs` rows that fuses them.

    With `interleaved` gate and up rows alternate; if not, gate's come first.
    """
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, outputs // 2), slice(outputs // 2, None)


def fuse_adapters(pairs: Iterable[AdapterPair], rows: Iterable[Rows], outputs: int) -> AdapterPair:
    """Merge the adapters of several weights into one of the parameter that fuses them, whose rank is the sum of theirs.

    Args:
        pairs: the adapters of each weight.
        rows: the rows of each weight in the fused parameter.
        outputs: number of rows of the fused parameter.
    """
    downs, ups = zip(*pairs, strict=True)
    down, begin = torch.cat(downs, -2), 0
    up = ups[0].new_zeros(*ups[0].shape[:-2], outputs, down.shape[-2])
    for block, row in zip(ups, rows, strict=True):
        up[..., row, begin : begin + block.shape[-1]] = block
        begin += block.shape[-1]
    return AdapterPair(down, up)


def is_block_diagonal(fused: AdapterPair, rows: Sequence[Rows]) -> bool:
    """Return whether B is zero where one weight's slice of the rank would change another's outputs.

    `rows` are the rows of each weight in the fused parameter. False if they cannot have equal slices of the rank.
    """
    rank, rest = divmod(fused.up.shape[-1], len(rows))
    return not rest and not any(
        fused.up[..., row, : rank * i].any() or fused.up[..., row, rank * (i + 1) :].any() for i, row in enumerate(rows)
    )


def split_adapters(fused: AdapterPair, rows: Sequence[Rows], block_diagonal: bool) -> list[AdapterPair]:
    """Return the adapters of each weight from the one of the parameter that fuses them.

    Args:
        fused: adapters of the fused parameter.
        rows: the rows of each weight in it.
        block_diagonal: whether B is block diagonal, so that each gets an equal slice of the rank; if not, all get the
            full A.
    """
    if not block_diagonal:
        return [AdapterPair(fused.down, fused.up[..., row, :]) for row in rows]
    slices = zip(rows, fused.down.chunk(len(rows), -2), fused.up.chunk(len(rows), -1), strict=True)
    return [AdapterPair(down, up[..., row, :]) for row, down, up in slices]
