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
    """Numbers of cached positions of each prompt in a batch, and of tokens that the current forward adds to each."""

    def __init__(self, device: torch.device):
        self.device, self.capacity = device, 0
        self.num_cached: list[int] = []
        self.num_new: list[int] = []
        self.row_B1 = self.place_Bn = self.to_int64([])
        """Rows and positions of the tokens that a forward adds, as tensors that all layers use."""

    def begin(self, lengths: list[int], most: int) -> None:
        """Prepare for the forward that computes all prompts.

        Args:
            lengths: tokens of each prompt.
            most: largest number of tokens that will be generated after each, for which the caches have room.
        """
        self.num_cached, self.num_new = [0] * len(lengths), lengths
        self.capacity = max(lengths, default=0) + most

    def advance(self, count: int = 1) -> None:
        """Prepare for a forward of `count` more tokens of each prompt, once the last forward's are cached."""
        self.num_cached = self.ends
        self.num_new = [count] * len(self.num_cached)
        self.row_B1 = self.to_int64(range(len(self.num_cached))).unsqueeze(1)
        self.place_Bn = self.to_int64(self.num_cached).unsqueeze(1) + torch.arange(count, device=self.device)

    def continue_row(self, num_kept: int, count: int, most: int) -> None:
        """Prepare for a forward of a single prompt whose first `num_kept` positions are cached already.

        Args:
            num_kept: cached positions to use; later ones have been removed from the caches.
            count: tokens of the prompt after them, which the forward computes.
            most: largest number of tokens that will be generated after the prompt.
        """
        self.num_cached, self.num_new = [num_kept], [0]
        self.capacity = max(self.capacity, num_kept + count + most)
        self.advance(count)

    def select(self, rows: list[int]) -> None:
        """Keep the prompts with these indices in the batch only."""
        self.num_cached, self.num_new = [self.num_cached[i] for i in rows], [self.num_new[i] for i in rows]

    @property
    def reads_prompts(self) -> bool:
        """Whether the current forward computes prompts from their start, so that nothing is cached yet."""
        return not any(self.num_cached)

    @property
    def ends(self) -> list[int]:
        """Number of positions of each prompt that are cached after the current forward."""
        return [num_cached + num_new for num_cached, num_new in zip(self.num_cached, self.num_new, strict=True)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each prompt's tokens among the concatenated tokens of the current forward."""
        out, first = [], 0
        for num_new in self.num_new:
            out.append((first, first + num_new))
            first += num_new
        return out

    def to_int64(self, values: Any) -> Tensor:
        """Return integers as an int64 tensor on the model's device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def split(self, x_1T: Tensor) -> Tensor:
        """Return the concatenated tokens of a forward (1, T, ...) as (B, n, ...). Not for the forward of prompts."""
        return x_1T[0, : sum(self.num_new)].unflatten(0, (len(self.num_new), -1))

    def join(self, x_Bn: Tensor, positions: int) -> Tensor:
        """Concatenate the tokens of all prompts (B, n, ...) to (1, T, ...), padded with zeros to T = `positions`."""
        x_1T = x_Bn.new_zeros(1, positions, *x_Bn.shape[2:])
        x_1T[0, : sum(self.num_new)] = x_Bn.flatten(0, 1)
        return x_1T
