"""Attention masks: documents, shared prompts and windows, described once for every implementation of attention.

Query q sees key k if k <= q < until[k] and depth[q] - depth[k] < window. `until` is where a document ends, or, where
several texts continue one prompt, the branch of a position with all that leaves it later: so completions do not see
each other. `depth` is the position within the text. The host knows the mask too: `Mask.pairs` lists the blocks to
compute without waiting for the device.

Shapes: B samples, L sequence, P prompts, X texts of one prompt, K keys of a block, Q queries of a block.
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
"""Most queries in one block with documents or a window, where more would compute many hidden keys."""


@dataclass(frozen=True, eq=False)
class OnHost:
    """The mask's `until` and `depth` in host memory. It is hashed by identity, as key of the cache of block pairs."""

    until_BL: np.ndarray
    depth_BL: np.ndarray | None

    @cached_property
    def halves(self) -> tuple[OnHost, OnHost]:
        """The masks of the first and second half of the samples: always the same objects, as keys of cached pairs."""
        depths = (None, None) if self.depth_BL is None else np.array_split(self.depth_BL, 2)
        first, second = (OnHost(*half) for half in zip(np.array_split(self.until_BL, 2), depths, strict=True))
        return first, second


class BlockPair(NamedTuple):
    """A block of queries and a contiguous range of keys, some of which these queries see: one unit of attention."""

    samples: slice
    """Samples of the batch that the block is computed for."""
    queries: slice
    """Positions of the queries in the sequence."""
    keys: slice
    """Positions of the keys in the sequence."""
    rows: slice
    """Indices of the queries in the tensor of the queries that this rank has."""
    columns: slice
    """Indices of the keys in the tensor of the keys that this rank has at this time."""
    masked: bool
    """Whether the mask hides some keys from some queries, beyond causality."""
    causal: bool
    """Whether queries and keys have the same positions and only causality hides any."""


class Mask(NamedTuple):
    """An attention mask, on the device and on the host. The default is causal."""

    until_BL: Tensor | None = None
    """The position before which queries see a key; None for the end of the sequence."""
    depth_BL: Tensor | None = None
    """Position within the text; None for the position in the sequence, if no document branches."""
    window: int = 0
    """Positions that a query sees, including its own; 0 for all."""
    on_host: OnHost | None = None
    """Copy of `until` and `depth` in host memory; None for a causal mask."""

    def to(self, move: Callable[[Tensor], Tensor]) -> Mask:
        """Return the mask with `move` applied to its tensors on the device, such as a copy to another device."""
        until, depth = (x if x is None else move(x) for x in (self.until_BL, self.depth_BL))
        return Mask(until, depth, self.window, self.on_host)

    def with_window(self, window: int) -> Mask:
        """Return the mask with another window: the number of positions that a query sees, 0 for all.

        `_replace` cannot be used: at a graph break, torch 2.11 rebuilds its result without its fields.
        """
        return Mask(self.until_BL, self.depth_BL, window, self.on_host)

    def halves(self) -> tuple[Mask, Mask]:
        """Return the masks of the first and of the second half of the samples; of an odd number, the first has more."""
        until, depth = ((None, None) if x is None else x.tensor_split(2) for x in (self.until_BL, self.depth_BL))
        on_host = (None, None) if self.on_host is None else self.on_host.halves
        first, second = (Mask(*half[:2], self.window, half[2]) for half in zip(until, depth, on_host, strict=True))
        return first, second

    def seen(self, samples: slice, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Return a bool tensor (B or 1, queries, keys): whether each of these queries sees each of these keys.

        Args:
            samples: the samples; slice(None) for all.
            queries: positions of the queries, with start and stop.
            keys: positions of the keys, with start and stop.
            device: device of the result, which the mask's tensors are on.
        """
        count = 1 if self.until_BL is None else len(self.until_BL)
        first, end = (0, count) if count == 1 or samples.stop is None else (samples.start, samples.stop)
        # Not slice.indices, which torch 2.11 cannot trace.
        ranges = (first, end), (queries.start, queries.stop), (keys.start, keys.stop)
        b, q, k = (torch.arange(*each, device=device) for each in ranges)
        return sees(self.until_BL, self.depth_BL, self.window, b.view(-1, 1, 1), q.view(1, -1, 1), k)

    def bias(self, pair: BlockPair, template: Tensor) -> Tensor | None:
        """Return what to add to the attention logits of a block: 0, or -inf for hidden keys; None if it hides none.

        It is None for a block with `pair.causal` too: the caller applies the causal mask.

        Args:
            pair: the block.
            template: a tensor with all samples of the batch as first dim, whose dtype and device are used.

        Returns:
            A tensor of shape (B, 1, queries, keys) for the B samples of the block, or None.
        """
        if not pair.masked:
            return None
        hidden = ~self.seen(pair.samples, pair.queries, pair.keys, template.device)
        bias = torch.zeros(hidden.shape, dtype=template.dtype, device=template.device).masked_fill(hidden, -torch.inf)
        return bias.expand(len(template[pair.samples]), -1, -1).unsqueeze(1)

    def pairs(self, chunk: int, chunks: int, query_chunks: Sequence[int], key_chunks: Sequence[int]) -> list[BlockPair]:
        """Return the blocks of queries and keys that attention has to compute; all other pairs are hidden.

        They are computed on the host, without waiting for the device. The list is cached: do not change it.

        Args:
            chunk: number of positions of a chunk.
            chunks: number of chunks of the sequence.
            query_chunks: indices of the chunks of queries, in the order of their tensor.
            key_chunks: indices of the chunks of keys, in the order of their tensor.
        """
        return _known_pairs(self.on_host, self.window, chunk, chunks, tuple(query_chunks), tuple(key_chunks))

    def count(self, length: int, samples: int = 1) -> int:
        """Return the number of pairs of a query and a key that the query sees, over all samples. Reads the host's copy.

        Args:
            length: number of positions of a sample.
            samples: number of samples; only used for a mask without documents.
        """
        if self.on_host is None:
            until, depth = np.full((samples, length), length), None
        else:
            until, depth = self.on_host.until_BL, self.on_host.depth_BL
        if self.window and depth is not None:  # a position and those before it in its text
            return int(np.minimum(depth + 1, self.window).sum())
        return int(np.minimum(until - np.arange(length), self.window or length).sum())


CAUSAL = Mask()
"""The mask without documents or a window."""


def sees(until_BL: Tensor | None, depth_BL: Tensor | None, window: int, b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return whether queries see keys, as bools: k <= q < until[k] and depth[q] - depth[k] < window.

    Args:
        until_BL: position before which queries see a key; None for a mask without documents.
        depth_BL: position within the text; None for the position in the sequence.
        window: number of positions that a query sees; 0 for all.
        b: indices of samples.
        q: positions of queries.
        k: positions of keys; `b`, `q` and `k` broadcast.
    """
    seen = k <= q
    if until_BL is not None:
        seen = seen & (q < until_BL[b, k])
    if window:
        apart = q - k if depth_BL is None else depth_BL[b, q] - depth_BL[b, k]
        seen = seen & (apart < window)
    return seen


def spans(until_BL: Tensor, depth_BL: Tensor | None = None) -> Mask:
    """Return the mask that has these CPU tensors, also as its copy for the host, in the same memory; without a window.

    Args:
        until_BL: position before which queries see each key.
        depth_BL: position of each token within its text; None for the position in the sequence.
    """
    return Mask(until_BL, depth_BL, 0, OnHost(until_BL.numpy(), None if depth_BL is None else depth_BL.numpy()))


def ends(document_BL: Tensor) -> Tensor:
    """Return for each position the end of its document: the position after the document's last one, shape (B, L).

    Args:
        document_BL: number of the document of each position; a document's positions are contiguous.
    """
    last = F.pad(document_BL[:, 1:] != document_BL[:, :-1], (0, 1), value=True)
    length = document_BL.shape[1]
    after = torch.arange(1, length + 1, device=document_BL.device).where(last, length)
    return after.flip(1).cummin(1).values.flip(1)


def branches(length_PX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `until` and `depth` of a sequence of prompts, each of which is followed by its completions.

    Args:
        length_PX: number of tokens of each prompt (first column) and of each of its completions; 0 where there is none.

    Returns:
        Two arrays with one number for each position of the sequence, whose length is the sum of `length_PX`.
    """
    end_PX = np.cumsum(length_PX).reshape(length_PX.shape)
    begin_PX, until_PX = end_PX - length_PX, end_PX.copy()
    until_PX[:, 0], begin_PX[:, 1:] = end_PX[:, -1], begin_PX[:, 1:] - length_PX[:, :1]
    until, begin = (np.repeat(x.ravel(), length_PX.ravel()) for x in (until_PX, begin_PX))
    return until, np.arange(len(begin)) - begin


@torch.compiler.assume_constant_result  # compiled code has no documents and cannot trace this
def _known_pairs(*arguments_of_pairs: Any) -> list[BlockPair]:
    return _pairs(*arguments_of_pairs)


@lru_cache(maxsize=1024)
def _pairs(
    host: OnHost | None, window: int, chunk: int, chunks: int, query_chunks: Sequence[int], key_chunks: Sequence[int]
) -> list[BlockPair]:
    """Return the blocks of `Mask.pairs`, by sample, query and key. All arguments are hashed, as the cache's key.

    Args:
        host: the mask in host memory; None for all samples without documents, under a causal mask and the window.
        window: number of positions that a query sees; 0 for all.
        chunk: number of positions of a chunk.
        chunks: number of chunks of the sequence.
        query_chunks: indices of the chunks of queries, a tuple in the order of their tensor.
        key_chunks: indices of the chunks of keys, likewise.
    """
    every_sample, place = slice(None), np.arange(chunk * chunks)
    samples_masks = [(every_sample, np.full_like(place, len(place)), place)]
    if host is not None:
        depths = [place] * len(host.until_BL) if host.depth_BL is None else host.depth_BL
        samples_masks = [(slice(n, n + 1), *row) for n, row in enumerate(zip(host.until_BL, depths, strict=True))]
    out = []
    for samples, until, depth in samples_masks:
        for query_index, i in enumerate(query_chunks):
            for queries in _query_blocks(slice(i * chunk, (i + 1) * chunk), until, BLOCK if window else chunk):
                for key_index, j in enumerate(key_chunks):
                    for keys, masked, causal in _key_ranges(
                        queries, slice(j * chunk, (j + 1) * chunk), until, depth, window
                    ):
                        rows = _shifted(queries, (query_index - i) * chunk)
                        columns = _shifted(keys, (key_index - j) * chunk)
                        out.append(BlockPair(samples, queries, keys, rows, columns, masked=masked, causal=causal))
    return out


def _query_blocks(chunk: slice, until: np.ndarray, most: int) -> Iterator[slice]:
    """Yield ranges of queries computed together, in order: branches of up to BLOCK in all, or a longer one in blocks.

    Args:
        chunk: positions of the chunk of queries.
        until: end of the branch of each position of the sequence.
        most: largest number of positions of a block of a long branch.
    """
    begin, borders = chunk.start, chunk.start + 1 + np.flatnonzero(np.diff(until[chunk]))
    for first, end in pairwise((chunk.start, *borders.tolist(), chunk.stop)):
        long = end - first >= BLOCK
        if begin < first and (long or end - begin > BLOCK):
            yield slice(begin, first)
            begin = first
        if long or end == chunk.stop:
            yield from (slice(at, min(at + most, end)) for at in range(begin, end, most))
            begin = end


def _shifted(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


def _key_ranges(
    queries: slice, keys: slice, until: np.ndarray, depth: np.ndarray, window: int
) -> Iterator[tuple[slice, bool, bool]]:
    """Yield the contiguous ranges of keys that some queries of a block see.

    Args:
        queries: positions of the block's queries.
        keys: positions of a chunk of keys.
        until: for each position of the sequence, the position before which queries see it as a key.
        depth: for each position of the sequence, the position within its text.
        window: number of positions that a query sees; 0 for all.

    Yields:
        The range, whether the mask hides some of its keys from some queries beyond causality, and whether queries and
            keys have the same positions and only causality hides any.
    """
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
