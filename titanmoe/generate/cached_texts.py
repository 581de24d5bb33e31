"""Bookkeeping of the texts that are being generated: their cached positions, and the tokens of a forward.

A forward reads new prompts, or the next tokens of all texts, as one sample without padding: tp splits the tokens as it
does a sequence, and only mixers know which belong together. Caches are paged: a page has 16 positions of one text, in
every layer; texts of the same prompt share the pages that it fills.

Shapes: T tokens of a forward, P prompts, B texts of this rank, n new tokens of each, W writes to caches, N pages of a
text, G key heads and g query heads of each, H query heads, h head width, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = 16
"""Positions of a page."""


class CachedTexts:
    """Cached positions of each text, their pages, and the tokens that the current forward adds."""

    def __init__(self, device: torch.device):
        self.device = device
        self.num_cached: list[int] = []
        """Cached positions of each text."""
        self.num_new: list[int] = []
        """Tokens of each prompt or text in the current forward."""
        self.reads_prompts = True
        """Whether the current forward reads new prompts from their start."""
        self.pages: list[list[int]] = []
        """Pages of each text, in the order of its positions."""
        self.num_users: list[int] = []
        """Number of texts that use each page."""
        self.free: list[int] = []
        """Pages that no text uses."""
        # Made once for all layers of a forward.
        none = self.to_int64([])
        self.source_W, self.page_W, self.offset_W = none, none, none
        """Index of each token to cache among those of a forward of prompts, its page, and its position there."""
        self.prompts: list[int] = []
        self.prompt_B = none
        """Prompt of each new text in a forward of prompts, on the host and on the device."""
        self.place_Bn = none
        """Positions of the tokens of a forward of tokens."""
        self.page_BN: Tensor | None = None
        """Pages of each text and zeros; None where `pages` has changed by more than new pages of its texts."""
        self._masks: dict[tuple[int, int, int, int], Tensor] = {}
        self._head_pages: dict[int, Tensor] = {}
        """Results of `mask` and `head_pages` for the current forward."""

    def begin_prompts(self, lengths: Sequence[int], copies: Sequence[int]) -> None:
        """Prepare for a forward of new prompts, which become texts after those that exist.

        Prompt i has lengths[i] tokens and becomes copies[i] texts. Pages that it fills are taken once for all of them,
        a page for the rest once for each.
        """
        self.num_new, self.reads_prompts, self.page_BN = list(lengths), True, None
        source, pages, offsets, self.prompts = [], [], [], []
        for number, ((first, end), count) in enumerate(zip(self.spans, copies, strict=True)):
            shared = [self._take() for _ in range((end - first) // PAGE)]
            source += range(first, first + len(shared) * PAGE)
            pages += [page for page in shared for _ in range(PAGE)]
            offsets += list(range(PAGE)) * len(shared)
            rest = end - first - len(shared) * PAGE
            for _ in range(count):
                unshared = [self._take()] if rest else []
                source += range(end - rest, end)
                pages += unshared * rest
                offsets += range(rest)
                self.pages.append(shared + unshared)
                self.num_cached.append(0)
                self.prompts.append(number)
            for page in shared:
                self.num_users[page] = count
        self.source_W, self.page_W, self.offset_W = map(self.to_int64, (source, pages, offsets))
        self.prompt_B = self.to_int64(self.prompts)

    def begin_tokens(self, count: int = 1) -> None:
        """Prepare for a forward of `count` more tokens of each text, and take the pages that they need, free or new.

        Only `end_forward` counts them as cached.
        """
        self.num_new, self.reads_prompts = [count] * len(self.num_cached), False
        taken = []  # text, index among the text's pages, page
        for text, (num_cached, pages) in enumerate(zip(self.num_cached, self.pages, strict=True)):
            while len(pages) * PAGE < num_cached + count:
                pages.append(self._take())
                taken.append((text, len(pages) - 1, pages[-1]))
        most = max(map(len, self.pages), default=0)
        if self.page_BN is None:
            table = [pages + [0] * (most - len(pages)) for pages in self.pages]
            self.page_BN, taken = self.to_int64(table).view(len(self.pages), most), []
        if missing := most - self.page_BN.shape[1]:  # negative if the longest texts have ended
            self.page_BN = F.pad(self.page_BN, (0, missing))
        if taken:
            text, index, page = self.to_int64(taken).unbind(1)
            self.page_BN[text, index] = page
        self.place_Bn = self.to_int64([range(first, first + count) for first in self.num_cached]).view(-1, count)
        self.page_W = self.page_BN.gather(1, self.place_Bn // PAGE).flatten()
        self.offset_W = (self.place_Bn % PAGE).flatten()
        self._masks, self._head_pages = {}, {}

    def mask(self, q_BnHh: Tensor, k_BGLh: Tensor, window: int) -> Tensor:
        """Return what is added to the attention logits of new tokens: -inf where a token does not attend, else 0.

        Call it within a forward that `begin_tokens` has prepared.

        Args:
            q_BnHh: queries of the new tokens.
            k_BGLh: cached keys of each text's first L positions, or with a window of its last L positions.
            window: number of last positions that a token attends to; 0 for all.

        Returns:
            A tensor (B * G, g * n, L) in the queries' dtype, which layers with equal shapes share: do not change it.
        """
        (B, n, H, _), (_, G, L, _) = q_BnHh.shape, k_BGLh.shape
        key = H, G, L, window
        if key not in self._masks:
            place_L, place_Bn1 = torch.arange(L, device=self.device), self.place_Bn.unsqueeze(2)
            if window:
                place_B1L = place_L + place_Bn1[:, -1:] + 1 - L
                hidden_BnL = (place_B1L > place_Bn1) | (place_B1L <= place_Bn1 - window) | (place_B1L < 0)
            else:
                hidden_BnL = place_L > place_Bn1
            mask_BnL = q_BnHh.new_zeros(hidden_BnL.shape).masked_fill_(hidden_BnL, -torch.inf)
            self._masks[key] = mask_BnL[:, None, None].expand(B, G, H // G, n, L).reshape(B * G, -1, L)
        return self._masks[key]

    def end_forward(self) -> None:
        """Count the tokens of the current forward as cached; `num_new` and `spans` are empty then."""
        new = [self.num_new[i] for i in self.prompts] if self.reads_prompts else self.num_new
        for text, count in enumerate(new, len(self.num_cached) - len(new)):
            self.num_cached[text] += count
        self.num_new = []

    def select(self, texts: Sequence[int]) -> Tensor:
        """Keep only the texts with these indices, in this order; return the indices as a tensor.

        The caller passes it to `Cache.select_texts` of each cache.
        """
        for text in set(range(len(self.pages))) - set(texts):
            self._release(self.pages[text])
        self.num_cached, self.pages = [self.num_cached[i] for i in texts], [self.pages[i] for i in texts]
        text_B = self.to_int64(texts)
        if self.page_BN is not None:
            self.page_BN = self.page_BN[text_B]
        return text_B

    def clear(self) -> None:
        """Remove all texts and pages."""
        self.num_cached, self.num_new, self.pages, self.num_users, self.free = [], [], [], [], []
        self.page_BN = None
        self._masks, self._head_pages = {}, {}

    def drop_last(self, count: int) -> None:
        """Remove the last `count` positions of the only text, which shares no page."""
        self.num_cached[0] -= count
        num_pages = -(-self.num_cached[0] // PAGE)
        self._release(self.pages[0][num_pages:])
        self.page_BN = None
        del self.pages[0][num_pages:]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each prompt's or text's tokens among the concatenated tokens of the current forward."""
        out, first = [], 0
        for num_new in self.num_new:
            out.append((first, first + num_new))
            first += num_new
        return out

    @property
    def num_pages(self) -> int:
        """Number of pages that a cache of all positions needs, those that are free now included."""
        return len(self.num_users)

    def head_pages(self, heads: int) -> Tensor:
        """Return indices (B * G * N,) of each text's pages, for each head, in a cache flattened to (pages * G, ...).

        Call it within a forward that `begin_tokens` has prepared.
        """
        if heads not in self._head_pages:
            head_G1 = torch.arange(heads, device=self.device).unsqueeze(1)
            self._head_pages[heads] = (self.page_BN.unsqueeze(1) * heads + head_G1).flatten()
        return self._head_pages[heads]

    def positions(self) -> Tensor:
        """Return the positions in their texts of the forward's tokens, (T,), without padding for tp."""
        if self.reads_prompts:
            return self.to_int64([place for count in self.num_new for place in range(count)])
        return self.place_Bn.flatten()

    def last_tokens(self) -> Tensor | slice:
        """Return the index of each prompt's or text's last token among the concatenated tokens of the forward.

        They are a tensor in a forward of prompts, else a slice.
        """
        if self.reads_prompts:
            return self.to_int64([end - 1 for _, end in self.spans])
        B, n = self.place_Bn.shape
        return slice(n - 1, B * n, n)

    def to_int64(self, values: Any) -> Tensor:
        """Return integers as an int64 tensor on the model's device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def split(self, x_1T: Tensor) -> Tensor:
        """Return the concatenated tokens of a forward (1, T, ...), padding removed, as (B, n, ...). Not for prompts."""
        B, n = self.place_Bn.shape
        return x_1T[0, : B * n].unflatten(0, (B, n))

    def join(self, x_Bn: Tensor, positions: int) -> Tensor:
        """Concatenate the tokens of all texts (B, n, ...) to (1, T, ...), padded with zeros to T = `positions`."""
        x_1T = x_Bn.flatten(0, 1).unsqueeze(0)
        if (missing := positions - x_1T.shape[1]) > 0:
            x_1T = F.pad(x_1T, (0, 0) * (x_1T.dim() - 2) + (0, missing))
        return x_1T

    def _take(self) -> int:
        """Return a page that no text uses, for one text; if none is free the next number, for which caches grow."""
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
