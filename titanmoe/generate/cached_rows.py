"""Bookkeeping of a batch of prompts (rows): cached positions, and the rows of a forward's tokens.

A forward's tokens are concatenated into one row, as if they were one sample: first all prompts, later one token of
each, or several when a conversation continues. So no prompt is padded to the length of another, tp splits the tokens as
it does a sequence, and the MoE layers see only real tokens. Only mixers know which tokens belong together.

Shapes: T tokens of a forward, B rows (prompts) of this rank, n new tokens of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Rows:
    """Number of cached positions of each row, and of tokens that the current forward adds."""

    def __init__(self, device: torch.device):
        self.device, self.capacity = device, 0
        self.num_cached: list[int] = []
        self.num_new: list[int] = []
        self.row_B1 = self.place_Bn = self.numbers([])
        """Rows and positions of the tokens that a forward adds, as tensors that all layers use."""

    def begin(self, lengths: list[int], most: int) -> None:
        """Prepare the forward of all prompts, each followed by at most `most` tokens."""
        self.num_cached, self.num_new = [0] * len(lengths), lengths
        self.capacity = max(lengths, default=0) + most

    def advance(self, count: int = 1) -> None:
        """Prepare a forward of `count` more tokens of each row."""
        self.num_cached = self.ends
        self.num_new = [count] * len(self.num_cached)
        self.row_B1 = self.numbers(range(len(self.num_cached))).unsqueeze(1)
        self.place_Bn = self.numbers(self.num_cached).unsqueeze(1) + torch.arange(count, device=self.device)

    def go_on(self, kept: int, count: int, most: int) -> None:
        """Prepare a forward of `count` tokens after the first `kept` positions of the only row."""
        self.num_cached, self.num_new = [kept], [0]
        self.capacity = max(self.capacity, kept + count + most)
        self.advance(count)

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.num_cached, self.num_new = [self.num_cached[i] for i in rows], [self.num_new[i] for i in rows]

    @property
    def begins(self) -> bool:
        """Whether the forward reads the prompts."""
        return not any(self.num_cached)

    @property
    def ends(self) -> list[int]:
        """Number of positions of each row that are cached after the forward."""
        return [num_cached + num_new for num_cached, num_new in zip(self.num_cached, self.num_new, strict=True)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each row's tokens in the forward."""
        out, first = [], 0
        for num_new in self.num_new:
            out.append((first, first + num_new))
            first += num_new
        return out

    def numbers(self, values: Any) -> Tensor:
        """Return integers as an int64 tensor on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def split(self, x_1T: Tensor) -> Tensor:
        """Return the tokens of a forward by row, (B, n, ...). Only after the forward of the prompts."""
        return x_1T[0, : sum(self.num_new)].unflatten(0, (len(self.num_new), -1))

    def join(self, x_Bn: Tensor, positions: int) -> Tensor:
        """Return the tokens of all rows concatenated, (1, T, ...), padded with zeros to `positions`."""
        x_1T = x_Bn.new_zeros(1, positions, *x_Bn.shape[2:])
        x_1T[0, : sum(self.num_new)] = x_Bn.flatten(0, 1)
        return x_1T
