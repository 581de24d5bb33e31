"""What a model remembers of earlier tokens: each mixer in a cache of its own kind, and the head at the end of each row.

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
    """A vector of every head and position of each row; with a window, of the last positions, at the end of L."""

    def __init__(self, rows: Rows, x_1TGh: Tensor, window: int = 0):
        """x_1TGh: of the prompts."""
        self.rows, self.window = rows, window
        length = min(max(rows.num_new, default=0), window - 1) if window else rows.capacity
        self.x = x_1TGh.new_zeros(len(rows.num_new), x_1TGh.shape[2], length, x_1TGh.shape[3])
        for row, (first, end) in enumerate(rows.spans):
            count = min(end - first, length)
            place = length - count if window else 0
            self.x[row, :, place : place + count] = x_1TGh[0, end - count : end].transpose(0, 1)

    def add(self, x_BnGh: Tensor) -> Tensor:
        """(B, G, L, h): all that the new tokens may see."""
        length, new_BGnh = self.x.shape[2], x_BnGh.transpose(1, 2)
        if self.window:
            x_BGLh = torch.cat((self.x, new_BGnh), 2)
            self.x = x_BGLh[:, :, max(0, x_BGLh.shape[2] - self.window + 1) :]
            return x_BGLh
        if self.rows.capacity > length:
            self.x = F.pad(self.x, (0, 0, 0, self.rows.capacity - length))
        self.x[self.rows.row_B1, :, self.rows.place_Bn] = x_BnGh
        return self.x[:, :, : max(self.rows.ends)]

    def keep(self, row_B: Tensor) -> None:
        self.x = self.x[row_B]

    def go_back(self, count: int) -> bool:
        if self.window and count:
            length = self.x.shape[2]
            self.x = self.x[:, :, : max(0, length - count)]
            return length < self.window - 1  # then it has all positions so far
        return True


class PerText:
    """A state of each row, which has gone through all of its positions."""

    def __init__(self, x_B: Tensor):
        self.x = x_B

    def keep(self, row_B: Tensor) -> None:
        self.x = self.x[row_B]

    def go_back(self, count: int) -> bool:
        return not count


class CacheSize(NamedTuple):
    """What a block keeps, in numbers of a rank."""

    token: int = 0
    """Of each token."""
    last: int = 0
    """Of how many tokens, the last ones; 0: of all."""
    state: int = 0
    """Of a text, at least in float32."""


class Cache(ABC):
    """Takes the place of what mixes tokens in a module; `titanmoe.generate.model.cache_path` says which does."""

    kept: Sequence[PerToken | PerText] = ()

    @abstractmethod
    def __init__(self, mixer: Any, rows: Rows):
        """mixer: the module."""

    @staticmethod
    @abstractmethod
    def size(model: Model, layer: int, tp: int) -> CacheSize: ...

    def keep(self, row_B: Tensor) -> None:
        """Forgets all other rows."""
        for each in self.kept:
            each.keep(row_B)

    def go_back(self, count: int) -> bool:
        """Forgets the last positions of the only row. False if it cannot: then all has to be read anew."""
        return all(each.go_back(count) for each in self.kept)


def cache_of(mixer: MixerSpec) -> type[Cache]:
    module, _, name = cache_path(mixer).partition(":")
    return getattr(import_module(module), name)


def cache_bytes(model: Model, tp: int, width: int) -> tuple[int, int]:
    """On a rank: of each token, and of each text, however long it is. width: bytes of a number."""
    token = text = 0
    for layer, mixer in enumerate(mixers(model)[: model.num_layers]):
        size = cache_of(mixer).size(model, layer, tp)
        token += width * size.token * (not size.last)
        text += width * size.token * size.last + max(width, 4) * size.state
    return token, text


def cache_cost(model: Model, tp: int, width: int) -> str:
    token, text = cache_bytes(model, tp, width)
    return f"{token:,} bytes per token" + f" and {text:,} per text" * (text > 0)


class LastHead(nn.Module):
    """Logits (1, B, V), of the last token of each row."""

    def __init__(self, head: Head, rows: Rows):
        super().__init__()
        self.head, self.rows = head, rows

    def forward(self, x_1sD: Tensor, labels: None, candidates_BSK: None = None) -> Tensor:
        last_B = self.rows.numbers([end - 1 for _, end in self.rows.spans])
        x_1BD = self.head.norm(all_gather_autograd(x_1sD, 1, self.head.tp)[:, last_B])
        if not len(last_B):
            return x_1BD
        return all_gather(F.linear(x_1BD, to_local(self.head.weight)), 2, self.head.tp)


def add_caches(model: Transformer, rows: Rows) -> list[Cache]:
    """Gives every mixer of the model its cache, and the head the ends of rows."""
    of_blocks = mixers(model.shape)
    caches = [cache_of(of_blocks[layer])(block.attention, rows) for layer, block in model.blocks().items()]
    model.head = LastHead(model.head, rows)
    return caches
