"""Caches of earlier tokens for decoding: base classes, their sizes, and how a model gets them.

`add_caches` replaces the token mixing of every block by a Cache, and the head by one that computes the last token of
each prompt only. The caches of attention and of linear attention are in `cached_attention` and `cached_state`.

Shapes: T tokens of a forward, B rows (prompts) of this rank, n new tokens of each, L positions, G key heads of this
rank, h the width of one, D model, V vocabulary.
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
from titanmoe.generate.cached_rows import Rows
from titanmoe.generate.model import cache_path
from titanmoe.models.families import mixers
from titanmoe.models.mixers.mixer_spec import MixerSpec
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import Head


class PerToken:
    """A cache of one vector for each head and position of each prompt; with a window, of the last positions only."""

    def __init__(self, rows: Rows, x_1TGh: Tensor, window: int = 0):
        """Allocate the cache and store the vectors of the prompts.

        Args:
            rows: the prompts' numbers of tokens.
            x_1TGh: the vectors of all prompts, concatenated.
            window: number of last positions that a token attends to; 0 for all.
        """
        self.rows, self.window = rows, window
        length = min(max(rows.num_new, default=0), window - 1) if window else rows.capacity
        self.x = x_1TGh.new_zeros(len(rows.num_new), x_1TGh.shape[2], length, x_1TGh.shape[3])
        for row, (first, end) in enumerate(rows.spans):
            count = min(end - first, length)
            place = length - count if window else 0
            self.x[row, :, place : place + count] = x_1TGh[0, end - count : end].transpose(0, 1)

    def add(self, x_BnGh: Tensor) -> Tensor:
        """Store the vectors of new tokens; return (B, G, L, h), all cached vectors that these tokens may attend to."""
        length, new_BGnh = self.x.shape[2], x_BnGh.transpose(1, 2)
        if self.window:
            x_BGLh = torch.cat((self.x, new_BGnh), 2)
            self.x = x_BGLh[:, :, max(0, x_BGLh.shape[2] - self.window + 1) :]
            return x_BGLh
        if self.rows.capacity > length:
            self.x = F.pad(self.x, (0, 0, 0, self.rows.capacity - length))
        self.x[self.rows.row_B1, :, self.rows.place_Bn] = x_BnGh
        return self.x[:, :, : max(self.rows.ends)]

    def select_rows(self, row_B: Tensor) -> None:
        """Keep the cache of the prompts with these indices in the batch only."""
        self.x = self.x[row_B]

    def drop_last(self, count: int) -> bool:
        """Remove the last `count` positions of the only prompt; return False if its window then lacks some."""
        if self.window and count:
            length = self.x.shape[2]
            self.x = self.x[:, :, : max(0, length - count)]
            return length < self.window - 1  # then it has all positions so far
        return True


class PerText:
    """A cache of one recurrent state for each prompt, after all of its positions."""

    def __init__(self, x_B: Tensor):
        self.x = x_B

    def select_rows(self, row_B: Tensor) -> None:
        """Keep the cache of the prompts with these indices in the batch only."""
        self.x = self.x[row_B]

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

    stored: Sequence[PerToken | PerText] = ()

    @abstractmethod
    def __init__(self, mixer: Any, rows: Rows):
        """Replace the token mixing of a mixer's module by this cache, in place."""

    @staticmethod
    @abstractmethod
    def size(model: Model, layer: int, tp: int) -> CacheSize:
        """Return the size of a layer's cache on a rank of a tp group of `tp` ranks."""

    def select_rows(self, row_B: Tensor) -> None:
        """Keep the cache of the prompts with these indices in the batch only, when others have ended."""
        for each in self.stored:
            each.select_rows(row_B)

    def drop_last(self, count: int) -> bool:
        """Remove the last `count` positions of the only prompt; return False if it must be computed from its start."""
        return all(each.drop_last(count) for each in self.stored)


def cache_of(mixer: MixerSpec) -> type[Cache]:
    """Import and return the cache class of a mixer; it must have one."""
    module, _, name = cache_path(mixer).partition(":")
    return getattr(import_module(module), name)


def cache_bytes(model: Model, tp: int, width: int) -> tuple[int, int]:
    """Return the bytes of a rank's caches over all layers.

    Args:
        model: the model.
        tp: ranks of a tp group.
        width: bytes of a number in the compute dtype.

    Returns:
        The bytes per token, and those per text of any length.
    """
    token = text = 0
    for layer, mixer in enumerate(mixers(model)[: model.num_layers]):
        size = cache_of(mixer).size(model, layer, tp)
        token += width * size.token * (not size.last)
        text += width * size.token * size.last + max(width, 4) * size.state
    return token, text


def cache_cost(model: Model, tp: int, width: int) -> str:
    """Return the size of a rank's cache as text, such as "12,288 bytes per token", for the command's last line.

    Args:
        model: the model.
        tp: ranks of a tp group.
        width: bytes of a number in the compute dtype.
    """
    token, text = cache_bytes(model, tp, width)
    return f"{token:,} bytes per token" + f" and {text:,} per text" * (text > 0)


class LastHead(nn.Module):
    """The output head while generating: it returns logits (1, B, V) of each prompt's last token only."""

    def __init__(self, head: Head, rows: Rows):
        super().__init__()
        self.head, self.rows = head, rows

    def forward(self, x_1sD: Tensor, labels: None, candidates_BSK: None = None) -> Tensor:
        last_B = self.rows.to_int64([end - 1 for _, end in self.rows.spans])
        x_1BD = self.head.norm(all_gather_autograd(x_1sD, 1, self.head.tp)[:, last_B])
        if not len(last_B):
            return x_1BD
        return all_gather(F.linear(x_1BD, to_local(self.head.weight)), 2, self.head.tp)


def add_caches(model: Transformer, rows: Rows) -> list[Cache]:
    """Replace every mixer's token mixing by a cache and the head by LastHead, in place; return the caches by layer."""
    of_blocks = mixers(model.shape)
    caches = [cache_of(of_blocks[layer])(block.attention, rows) for layer, block in model.blocks().items()]
    model.head = LastHead(model.head, rows)
    return caches
