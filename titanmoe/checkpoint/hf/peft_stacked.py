"""Convert adapters of experts that transformers stacks in one parameter, as PEFT has them (`target_parameters`).

PEFT's A is (experts * r, inputs), one expert after the other; its B is (outputs, r * experts), with the experts next to
each other. Gate and up are one matrix in transformers, of F outputs each: their adapters are merged into one of rank
2r, whose A has gate's rows before up's and whose B is block diagonal. At twice the alpha that computes the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class AdapterPair(NamedTuple):
    """The adapters of one weight of all experts."""

    down: Tensor
    """A: (experts, r, inputs)."""
    up: Tensor
    """B: (experts, outputs, r)."""

    def to_peft(self) -> AdapterPair:
        """Return A and B in the shapes of PEFT's files: (experts * r, inputs) and (outputs, r * experts)."""
        return AdapterPair(self.down.flatten(0, 1), self.up.permute(1, 2, 0).flatten(1))

    def widened(self, rank: int) -> AdapterPair:
        """Return adapters of a larger rank that compute the same: A and B padded with zeros."""
        more = rank - self.down.shape[1]
        if not more:
            return self
        return AdapterPair(functional.pad(self.down, (0, 0, 0, more)), functional.pad(self.up, (0, more)))


def from_peft(down: Tensor, up: Tensor, experts: int) -> AdapterPair:
    """Return A (experts, r, inputs) and B (experts, outputs, r), from A and B in the shapes of PEFT's files.

    Those are (experts * r, inputs) and (outputs, r * experts).
    """
    return AdapterPair(down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).permute(2, 0, 1))


def _gate_and_up_rows(hidden: int, interleaved: bool) -> tuple[slice, slice]:
    """Return the slices of the rows of gate, then of up, in the weight that fuses them: `hidden` rows of each.

    With `interleaved` gate and up rows alternate; if not, gate's come first.
    """
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, hidden), slice(hidden, None)


def fuse_gate_up(gate: AdapterPair, up: AdapterPair, interleaved: bool) -> AdapterPair:
    """Merge the adapters of gate and up into one of twice the rank for the weight that fuses them.

    Args:
        gate: adapters of gate.
        up: adapters of up, of the same rank.
        interleaved: whether gate and up rows alternate in the fused weight; if not, gate's come first.
    """
    experts, hidden, rank = gate.up.shape
    both = gate.up.new_zeros(experts, 2 * hidden, 2 * rank)
    first, second = _gate_and_up_rows(hidden, interleaved)
    both[:, first, :rank], both[:, second, rank:] = gate.up, up.up
    return AdapterPair(torch.cat((gate.down, up.down), 1), both)


def is_block_diagonal(both: AdapterPair, interleaved: bool) -> bool:
    """Return whether B has zeros where gate's half of the rank would change up's outputs, and up's half gate's.

    `both` are adapters of the weight that fuses gate and up, whose rows alternate if `interleaved`. False if the rank
    is odd.
    """
    first, second = _gate_and_up_rows(both.up.shape[1] // 2, interleaved)
    rank, rest = divmod(both.up.shape[2], 2)
    return not rest and not both.up[:, first, rank:].any() and not both.up[:, second, :rank].any()


def split_gate_up(both: AdapterPair, interleaved: bool, block_diagonal: bool) -> tuple[AdapterPair, AdapterPair]:
    """Return the adapters of gate and of up from those of the weight that fuses them.

    Args:
        both: adapters of the fused weight.
        interleaved: whether gate and up rows alternate in it; if not, gate's come first.
        block_diagonal: whether B is block diagonal, so that each has half of the rank; if not, both get the full A.
    """
    first, second = _gate_and_up_rows(both.up.shape[1] // 2, interleaved)
    gate, up, rank = both.up[:, first], both.up[:, second], both.down.shape[1] // 2
    if not block_diagonal:
        return AdapterPair(both.down, gate), AdapterPair(both.down, up)
    return AdapterPair(both.down[:, :rank], gate[..., :rank]), AdapterPair(both.down[:, rank:], up[..., rank:])
