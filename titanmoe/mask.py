"""Which positions of a sequence see which: the one description that every implementation of attention reads.

Query q sees key k if k <= q < until[k] and depth[q] - depth[k] < window.

A document is a tree. Usually it has no branches, and `until` is its end. Where several texts go on from one, such as
the answers to a prompt, each follows the last without seeing it: `until` is the end of the branch that a position is
on, with all that branches off later. So the prompt is there once. A position's depth is its place in its text.

For each block of queries the host knows which runs of keys some of them see (`pairs`), without waiting for the device.
Every implementation computes those, and nothing else.

Shapes: B samples, L sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Queries that are computed together at most, where something besides causality hides keys from some of them."""


@dataclass(frozen=True, eq=False)
class OnHost:
    until_BL: np.ndarray
    depth_BL: np.ndarray | None

    @cached_property
    def halves(self) -> tuple[OnHost, OnHost]:
        """Of the samples: made once, because what is known of a mask goes by this object."""
        depths = (None, None) if self.depth_BL is None else np.array_split(self.depth_BL, 2)
        first, second = (OnHost(*half) for half in zip(np.array_split(self.until_BL, 2), depths, strict=True))
        return first, second


class BlockPair(NamedTuple):
    """A block of queries and a run of keys. In some samples, or all; in places of the sequence; and where they are in
    a tensor of a rank's chunks."""

    samples: slice
    queries: slice
    keys: slice
    rows: slice
    columns: slice
    masked: bool
    """Whether the mask hides some keys from some queries, beyond causality."""
    causal: bool
    """Whether queries and keys are the same places, and only causality hides any."""


class Mask(NamedTuple):
    until_BL: Tensor | None = None
    """None: the end of the sequence."""
    depth_BL: Tensor | None = None
    """None: a position's place in the sequence, which serves as well where no document branches."""
    window: int = 0
    """0: there is none."""
    on_host: OnHost | None = None

    def to(self, move: Callable[[Tensor], Tensor]) -> Mask:
        until, depth = (x if x is None else move(x) for x in (self.until_BL, self.depth_BL))
        return Mask(until, depth, self.window, self.on_host)

    def with_window(self, window: int) -> Mask:
        """Return the mask with another window.

        Not by `_replace`: where a graph breaks, torch 2.11 rebuilds its result without its fields.
        """
        return Mask(self.until_BL, self.depth_BL, window, self.on_host)

    def halves(self) -> tuple[Mask, Mask]:
        """Of the first half of the samples, and of the other."""
        until, depth = ((None, None) if x is None else x.tensor_split(2) for x in (self.until_BL, self.depth_BL))
        on_host = (None, None) if self.on_host is None else self.on_host.halves
        first, second = (Mask(*half[:2], self.window, half[2]) for half in zip(until, depth, on_host, strict=True))
        return first, second

    def seen(self, samples: slice, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Return (B or 1, queries, keys): which of these keys each of these queries sees.

        Args:
            samples: slice(None) for all of them.
        """
        count = 1 if self.until_BL is None else len(self.until_BL)
        first, end = (0, count) if count == 1 or samples.stop is None else (samples.start, samples.stop)
        # Not slice.indices, which torch 2.11 cannot trace.
        ranges = (first, end), (queries.start, queries.stop), (keys.start, keys.stop)
        b, q, k = (torch.arange(*each, device=device) for each in ranges)
        return sees(self.until_BL, self.depth_BL, self.window, b.view(-1, 1, 1), q.view(1, -1, 1), k)

    def bias(self, pair: BlockPair, like: Tensor) -> Tensor | None:
        """(B, 1, queries, keys) to be added to scores: -inf for what the mask hides; None if it hides nothing."""
        if not pair.masked:
            return None
        hidden = ~self.seen(pair.samples, pair.queries, pair.keys, like.device)
        bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, -torch.inf)
        return bias.expand(len(like[pair.samples]), -1, -1).unsqueeze(1)

    def pairs(self, chunk: int, chunks: int, query_chunks: Sequence[int], key_chunks: Sequence[int]) -> list[BlockPair]:
        """What chunks of queries see of chunks of keys, of `chunks` that have `chunk` positions each."""
        return _known_pairs(self.on_host, self.window, chunk, chunks, tuple(query_chunks), tuple(key_chunks))

    def count(self, length: int, samples: int = 1) -> int:
        """How many pairs of a query and a key see each other."""
        if self.on_host is None:
            until, depth = np.full((samples, length), length), None
        else:
            until, depth = self.on_host.until_BL, self.on_host.depth_BL
        if self.window and depth is not None:  # a position and those that it goes on from
            return int(np.minimum(depth + 1, self.window).sum())
        return int(np.minimum(until - np.arange(length), self.window or length).sum())


CAUSAL = Mask()


def sees(until_BL: Tensor | None, depth_BL: Tensor | None, window: int, b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Of a mask; sample, query and key by number, of shapes that broadcast."""
    seen = k <= q
    if until_BL is not None:
        seen = seen & (q < until_BL[b, k])
    if window:
        apart = q - k if depth_BL is None else depth_BL[b, q] - depth_BL[b, k]
        seen = seen & (apart < window)
    return seen


def spans(until_BL: Tensor, depth_BL: Tensor | None = None) -> Mask:
    """From tensors of the host."""
    return Mask(until_BL, depth_BL, 0, OnHost(until_BL.numpy(), None if depth_BL is None else depth_BL.numpy()))


def ends(document_BL: Tensor) -> Tensor:
    """Of each position's document, one run of positions each: the place after its last."""
    last = F.pad(document_BL[:, 1:] != document_BL[:, :-1], (0, 1), value=True)
    length = document_BL.shape[1]
    after = torch.arange(1, length + 1, device=document_BL.device).where(last, length)
    return after.flip(1).cummin(1).values.flip(1)


def branches(length_PX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """until and depth, where P stems follow each other, each with what goes on from it; X lengths, the stem's first."""
    end_PX = np.cumsum(length_PX).reshape(length_PX.shape)
    begin_PX, until_PX = end_PX - length_PX, end_PX.copy()
    until_PX[:, 0], begin_PX[:, 1:] = end_PX[:, -1], begin_PX[:, 1:] - length_PX[:, :1]
    until, begin = (np.repeat(x.ravel(), length_PX.ravel()) for x in (until_PX, begin_PX))
    return until, np.arange(len(begin)) - begin


@torch.compiler.assume_constant_result  # compiled code has no documents, and cannot trace this
def _known_pairs(*about: Any) -> list[BlockPair]:
    return _pairs(*about)


@lru_cache(maxsize=1024)
def _pairs(
    host: OnHost | None,
    window: int,
    chunk: int,
    chunks: int,
    query_chunks: Sequence[int],
    key_chunks: Sequence[int],
) -> list[BlockPair]:
    every_sample, place = slice(None), np.arange(chunk * chunks)
    rows = [(every_sample, np.full_like(place, len(place)), place)]
    if host is not None:
        depths = [place] * len(host.until_BL) if host.depth_BL is None else host.depth_BL
        rows = [(slice(n, n + 1), *row) for n, row in enumerate(zip(host.until_BL, depths, strict=True))]
    out = []
    for samples, until, depth in rows:
        for at, i in enumerate(query_chunks):
            for queries in _stretches(slice(i * chunk, (i + 1) * chunk), until, BLOCK if window else chunk):
                for there, j in enumerate(key_chunks):
                    for keys, masked, causal in _runs(queries, slice(j * chunk, (j + 1) * chunk), until, depth, window):
                        own, other = _moved(queries, (at - i) * chunk), _moved(keys, (there - j) * chunk)
                        out.append(BlockPair(samples, queries, keys, own, other, masked, causal))
    return out


def _stretches(chunk: slice, until: np.ndarray, most: int) -> Iterator[slice]:
    """Queries to be computed together: a branch, in pieces of at most `most`, or several that are short."""
    begin, borders = chunk.start, chunk.start + 1 + np.flatnonzero(np.diff(until[chunk]))
    for first, end in pairwise((chunk.start, *borders.tolist(), chunk.stop)):
        long = end - first >= BLOCK
        if begin < first and (long or end - begin > BLOCK):
            yield slice(begin, first)
            begin = first
        if long or end == chunk.stop:
            yield from (slice(at, min(at + most, end)) for at in range(begin, end, most))
            begin = end


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


def _runs(
    queries: slice, keys: slice, until: np.ndarray, depth: np.ndarray, window: int
) -> Iterator[tuple[slice, bool, bool]]:
    """Runs of keys that some of the queries see, whether the mask hides some of those, and whether only causality
    does."""
    first, end = queries.start, queries.stop
    keys = slice(keys.start, min(keys.stop, end))
    if keys.start >= keys.stop:
        return
    until_K, depth_K, place_K = until[keys], depth[keys], np.arange(keys.start, keys.stop)
    last_K = np.minimum(until_K, end) - 1 - first  # the last query that sees it, if any does
    some_K, every_K = last_K >= 0, until_K >= end
    if window:
        depth_Q = depth[queries]
        some_K &= np.minimum.accumulate(depth_Q)[np.maximum(last_K, 0)] - depth_K < window
        every_K &= depth_Q.max() - depth_K < window
    diagonal_K = place_K >= first
    causal = bool(diagonal_K.any() and every_K[diagonal_K].all())
    # Of keys beside each other: 0 hidden, 1 masked, 2 seen by all, 3 the queries' own places under causality alone.
    kind_K = np.where(diagonal_K, np.where(causal, 3, 1), some_K.astype(np.int8) + every_K)
    borders = [0, *np.flatnonzero(np.diff(kind_K)) + 1, len(kind_K)]
    for begin, stop in pairwise(borders):
        if kind := kind_K[begin]:
            yield slice(keys.start + int(begin), keys.start + int(stop)), bool(kind == 1), bool(kind == 3)
