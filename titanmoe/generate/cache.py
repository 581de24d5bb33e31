"""Caches of earlier tokens for decoding: base classes, their sizes, and how a model gets them.

`add_caches` replaces the token mixing of every block by a Cache, and the head by one that computes the last token of
each prompt or text only. The caches of attention and of linear attention are in `cached_attention` and `cached_state`.

Shapes: T tokens of a forward, P new prompts, B texts of this rank, n new tokens of each, W vectors to store, N pages of
a text, L positions, G key heads of this rank, h the width of a vector, D model, V vocabulary, s owned tokens (T over
tp), S positions, K candidate ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import all_gather, all_gather_autograd, to_local
from titanmoe.config.schema import Model
from titanmoe.generate.cached_texts import PAGE, CachedTexts
from titanmoe.generate.model import cache_path
from titanmoe.models.families import mixers
from titanmoe.models.mixers.mixer_spec import MixerSpec
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import Head


class PerToken:
    """A cache of one vector for each head and position of each text."""

    def __init__(self, texts: CachedTexts):
        self.texts = texts
        self.x: Tensor | None = None
        """The vectors by page, (pages, G, PAGE, h); None before the first prompt."""

    def add_prompts(self, x_1TGh: Tensor) -> None:
        """Store the vectors of new prompts, one after another in the forward, in the pages that `texts` assigns."""
        self._store(x_1TGh[0, self.texts.source_W])

    def add(self, x_BnGh: Tensor) -> Tensor:
        """Store the vectors of new tokens; return (B, G, L, h), all cached vectors of each text, new ones included.

        Vectors after a text's last position have no meaning.
        """
        self._store(x_BnGh.flatten(0, 1))
        G, (B, N) = self.x.shape[1], self.texts.page_BN.shape
        pages = self.x.flatten(0, 1).index_select(0, self.texts.head_pages(G))  # on CPUs, faster than [...]
        return pages.view(B, G, N * PAGE, -1)

    def _store(self, x_WGh: Tensor) -> None:
        texts = self.texts
        if self.x is None:
            self.x = x_WGh.new_zeros(0, x_WGh.shape[1], PAGE, x_WGh.shape[2])
        if len(self.x) < texts.num_pages:
            # By half more than needed, so that all copies together are a few times the cache.
            self.x = F.pad(self.x, (0, 0) * 3 + (0, texts.num_pages * 3 // 2 - len(self.x)))
        self.x[texts.page_W, :, texts.offset_W] = x_WGh

    def select_texts(self, text_B: Tensor) -> None:
        """Do nothing: `CachedTexts` has released the pages of other texts."""

    def drop_last(self, count: int) -> bool:
        """Return True: the last positions of the only text can be overwritten."""
        return True


class PerWindow:
    """A cache of one vector for each head and each of the last positions of a text, which are at the right.

    It has window - 1 positions, or as many as the longest text has had. `window` is the number of last positions that a
    token attends to.
    """

    def __init__(self, texts: CachedTexts, window: int):
        self.texts, self.window = texts, window
        self.x: Tensor | None = None
        """The vectors, (B, G, L, h), zeros before a text's first position; None before the first prompt."""

    def add_prompts(self, x_1TGh: Tensor) -> None:
        """Append the last positions of new prompts, one after another in `x_1TGh`, once for each of their texts."""
        x_TGh, stored = x_1TGh[0], 0 if self.x is None else self.x.shape[2]
        length = max(stored, min(self.window - 1, max(self.texts.num_new, default=0)))
        x_PGLh = x_TGh.new_zeros(len(self.texts.num_new), x_TGh.shape[1], length, x_TGh.shape[2])
        for prompt, (first, end) in enumerate(self.texts.spans):
            count = min(end - first, length)
            x_PGLh[prompt, :, length - count :] = x_TGh[end - count : end].transpose(0, 1)
        x_BGLh = x_PGLh[self.texts.prompt_B]
        if self.x is not None:
            x_BGLh = torch.cat((F.pad(self.x, (0, 0, length - stored, 0)), x_BGLh))
        self.x = x_BGLh

    def add(self, x_BnGh: Tensor) -> Tensor:
        """Store the vectors of new tokens; return (B, G, L, h), all vectors that these tokens may attend to."""
        x_BGLh = torch.cat((self.x, x_BnGh.transpose(1, 2)), 2)
        self.x = x_BGLh[:, :, max(0, x_BGLh.shape[2] - self.window + 1) :]
        return x_BGLh

    def select_texts(self, text_B: Tensor) -> None:
        """Keep the cache of the texts with these indices only, in this order."""
        self.x = self.x[text_B]

    def drop_last(self, count: int) -> bool:
        """Remove the last `count` positions of the only text; return False if its window then lacks some.

        Call it before `CachedTexts.drop_last`.
        """
        length = self.x.shape[2]
        if count:
            self.x = self.x[:, :, : max(0, length - count)]
        return not count or self.texts.num_cached[0] <= length


class PerText:
    """A cache of one recurrent state for each text, after all of its positions."""

    def __init__(self, texts: CachedTexts):
        self.texts = texts
        self.x: Tensor | None = None
        """The states, (B, ...); None before the first prompt."""

    def add_prompts(self, x_P: Tensor) -> None:
        """Add the state after its prompt for each text of the new prompts; x_P has one for each prompt."""
        x_B = x_P[self.texts.prompt_B]
        self.x = x_B if self.x is None else torch.cat((self.x, x_B))

    def select_texts(self, text_B: Tensor) -> None:
        """Keep the cache of the texts with these indices only, in this order."""
        self.x = self.x[text_B]

    def drop_last(self, count: int) -> bool:
        """Return whether `count` is 0: a recurrent state cannot go back to an earlier position."""
        return not count


class CacheSize(NamedTuple):
    """Size of a block's cache on a rank, as counts of numbers."""

    token: int = 0
    """Numbers per token."""
    last: int = 0
    """Number of last tokens that are cached; 0 for all."""
    state: int = 0
    """Numbers per text, stored in float32 or wider."""


class Cache(ABC):
    """Base class of a block's cache, which replaces the token mixing of its module (`model.cache_path`)."""

    stored: Sequence[PerToken | PerWindow | PerText] = ()
    """The caches of its tensors; none, or with `x` = None, before the first prompt."""

    @abstractmethod
    def __init__(self, mixer: Any, texts: CachedTexts):
        """Replace the token mixing of a mixer's module by this cache, in place."""

    @staticmethod
    @abstractmethod
    def size(model: Model, layer: int, tp: int) -> CacheSize:
        """Return the size, in numbers, of block number `layer`'s cache on a rank of a tp group of `tp` ranks."""

    def select_texts(self, text_B: Tensor) -> None:
        """Keep the cache of the texts with these indices only, in this order, when others have ended."""
        for each in self.stored:
            each.select_texts(text_B)

    def drop_last(self, count: int) -> bool:
        """Remove the last `count` positions of the only text; return False if it must be computed from its start.

        Call it before `CachedTexts.drop_last`. After False the cache may have removed some: select no texts, and begin
        anew.
        """
        return all(each.drop_last(count) for each in self.stored)


def cache_of(mixer: MixerSpec) -> type[Cache]:
    """Import and return the cache class of a mixer; it must have one."""
    module, _, name = cache_path(mixer).partition(":")
    return getattr(import_module(module), name)


def cache_bytes(model: Model, tp: int, width: int) -> tuple[int, int]:
    """Return the bytes of a rank's caches over all layers: per token, and per text of any length.

    `width` is the bytes of a number in the compute dtype, `tp` the ranks of a tp group. Layers with a window
    count per text, with a full window.
    """
    token = text = 0
    for layer, mixer in enumerate(mixers(model)[: model.num_layers]):
        size = cache_of(mixer).size(model, layer, tp)
        token += width * size.token * (not size.last)
        text += width * size.token * size.last + max(width, 4) * size.state
    return token, text


def cache_cost(model: Model, tp: int, width: int) -> str:
    """Return the size of a rank's cache as text, such as "12,288 bytes per token", for the command's last line.

    Takes the arguments of `cache_bytes`.
    """
    token, text = cache_bytes(model, tp, width)
    return f"{token:,} bytes per token" + f" and {text:,} per text" * (text > 0)


class LastHead(nn.Module):
    """The output head while generating: it returns logits of each prompt's or text's last token only.

    They are (1, B, V), or (1, P, V) in a forward of prompts; (1, 0, D) without tokens. The labels are not read. A
    forward is collective over tp.
    """

    def __init__(self, head: Head, texts: CachedTexts):
        super().__init__()
        self.head, self.texts = head, texts

    def forward(self, x_1sD: Tensor, labels: None, candidates_BSK: None = None) -> Tensor:
        x_1BD = self.head.norm(all_gather_autograd(x_1sD, 1, self.head.tp)[:, self.texts.last_tokens()])
        if not x_1BD.shape[1]:
            return x_1BD
        return all_gather(F.linear(x_1BD, to_local(self.head.weight)), 2, self.head.tp)


def add_caches(model: Transformer, texts: CachedTexts) -> list[Cache]:
    """Replace every mixer's token mixing by a cache and the head by LastHead, in place; return caches in layer order.

    All caches and the head share `texts`, the texts in progress.
    """
    of_blocks = mixers(model.shape)
    caches = [cache_of(of_blocks[layer])(block.attention, texts) for layer, block in model.blocks().items()]
    model.head = LastHead(model.head, texts)
    return caches
