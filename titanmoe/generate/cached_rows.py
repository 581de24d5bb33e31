"""Bookkeeping of the texts (rows) that are being generated: their cached positions, and the tokens of a forward.

A forward reads either new prompts or the next tokens of all rows, concatenated into one sample without padding. So tp
splits the tokens as it does a sequence, and the MoE layers see only real tokens. Only mixers know which tokens belong
together.

Caches of all positions are paged: a page has 16 positions (slots) of one row, and every layer stores a position's
vector in the slot that this class assigns. Rows of the same prompt share the pages that the prompt fills.

Shapes: T tokens of a forward, P prompts, B rows of this rank, n new tokens of each, W writes to caches, N pages of a
row, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PAGE = 16
"""Positions of a page."""


class Rows:
    """Cached positions of each row, their pages, and the tokens that the current forward adds."""

    def __init__(self, device: torch.device):
        self.device = device
        self.num_cached: list[int] = []
        """Cached positions of each row."""
        self.num_new: list[int] = []
        """Tokens of each prompt or row in the current forward."""
        self.reads_prompts = True
        """Whether the current forward reads new prompts from their start."""
        self.pages: list[list[int]] = []
        """Pages of each row, in the order of its positions."""
        self.num_users: list[int] = []
        """Number of rows that use each page."""
        self.free: list[int] = []
        """Pages that no row uses."""
        # Made once for all layers of a forward.
        none = self.to_int64([])
        self.source_W, self.slot_W = none, none
        """Index of each token to cache among the forward's, and the slot that it is stored in."""
        self.prompt_B = none
        """Of a forward of prompts: the prompt of each new row."""
        self.place_Bn, self.slot_BL = none, none
        """Of a forward of tokens: their positions, and the slots of all positions of each row and of some after."""

    def begin_prompts(self, lengths: Sequence[int], copies: Sequence[int]) -> None:
        """Prepare for a forward of prompts, which become rows after those that exist.

        Args:
            lengths: tokens of each prompt.
            copies: number of rows that each prompt becomes.
        """
        self.num_new, self.reads_prompts = list(lengths), True
        source, slots, prompt_of_row = [], [], []
        for number, ((first, end), count) in enumerate(zip(self.spans, copies, strict=True)):
            shared = [self._take() for _ in range((end - first) // PAGE)]
            source += range(first, first + len(shared) * PAGE)
            slots += [page * PAGE + i for page in shared for i in range(PAGE)]
            rest = end - first - len(shared) * PAGE
            for _ in range(count):
                own = [self._take()] if rest else []
                source += range(end - rest, end)
                slots += [page * PAGE + i for page in own for i in range(rest)]
                self.pages.append(shared + own)
                self.num_cached.append(0)
                prompt_of_row.append(number)
            for page in shared:
                self.num_users[page] = count
        self.source_W, self.slot_W, self.prompt_B = map(self.to_int64, (source, slots, prompt_of_row))

    def begin_tokens(self, count: int = 1) -> None:
        """Prepare for a forward of `count` more tokens of each row."""
        self.num_new, self.reads_prompts = [count] * len(self.num_cached), False
        for num_cached, pages in zip(self.num_cached, self.pages, strict=True):
            while len(pages) * PAGE < num_cached + count:
                pages.append(self._take())
        most = max(map(len, self.pages), default=0)
        page_BN = self.to_int64([pages + [0] * (most - len(pages)) for pages in self.pages]).view(len(self.pages), most)
        self.slot_BL = (page_BN.unsqueeze(2) * PAGE + torch.arange(PAGE, device=self.device)).flatten(1)
        self.place_Bn = self.to_int64(self.num_cached).unsqueeze(1) + torch.arange(count, device=self.device)
        self.slot_W = self.slot_BL.gather(1, self.place_Bn).flatten()

    def end_forward(self) -> None:
        """Count the tokens of the current forward as cached."""
        new = [self.num_new[i] for i in self.prompt_B.tolist()] if self.reads_prompts else self.num_new
        for row, count in enumerate(new, len(self.num_cached) - len(new)):
            self.num_cached[row] += count
        self.num_new = []

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        for row in set(range(len(self.pages))) - set(rows):
            self._release(self.pages[row])
        self.num_cached, self.pages = [self.num_cached[i] for i in rows], [self.pages[i] for i in rows]

    def clear(self) -> None:
        """Remove all rows and pages."""
        self.num_cached, self.num_new, self.pages, self.num_users, self.free = [], [], [], [], []

    def drop_last(self, count: int) -> None:
        """Remove the last `count` positions of the only row, which shares no page."""
        self.num_cached[0] -= count
        num_pages = -(-self.num_cached[0] // PAGE)
        self._release(self.pages[0][num_pages:])
        del self.pages[0][num_pages:]

    @property
    def num_slots(self) -> int:
        """Number of slots that a cache of all positions needs."""
        return len(self.num_users) * PAGE

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each prompt's or row's tokens among the concatenated tokens of the current forward."""
        out, first = [], 0
        for num_new in self.num_new:
            out.append((first, first + num_new))
            first += num_new
        return out

    def to_int64(self, values: Any) -> Tensor:
        """Return integers as an int64 tensor on the model's device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def split(self, x_1T: Tensor) -> Tensor:
        """Return the concatenated tokens of a forward (1, T, ...) as (B, n, ...). Not for a forward of prompts."""
        return x_1T[0, : sum(self.num_new)].unflatten(0, (len(self.num_new), -1))

    def join(self, x_Bn: Tensor, positions: int) -> Tensor:
        """Concatenate the tokens of all rows (B, n, ...) to (1, T, ...), padded with zeros to T = `positions`."""
        x_1T = x_Bn.new_zeros(1, positions, *x_Bn.shape[2:])
        x_1T[0, : sum(self.num_new)] = x_Bn.flatten(0, 1)
        return x_1T

    def _take(self) -> int:
        """Return a page that no row uses, for one row."""
        if not self.free:
            self.free.append(len(self.num_users))
            self.num_users.append(0)
        page = self.free.pop()
        self.num_users[page] = 1
        return page

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.num_users[page] -= 1
            if not self.num_users[page]:
                self.free.append(page)
