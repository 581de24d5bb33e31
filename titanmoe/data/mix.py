"""Several sources in one run: which one is next, and how far each has got.

Which source gives sample n of the run is a function of (seed, n), and in a run of epochs of how many sequences the
sources have; which of its sequences, of how many it has given.

Shapes: N samples, K sources.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from titanmoe.data.batch import WEIGHT
from titanmoe.data.epochs import Epochs
from titanmoe.data.pack import Arrays, Pieces, empty, further_of
from titanmoe.data.shards import StoredTokenizer
from titanmoe.ops.counter_rng import bits, key

LOST = "pairs", "long chats", "cut chats"
"""Rows of the header on what the data loses; they are events, too."""


class Source(NamedTuple):
    name: str
    fingerprint: str
    description: str
    weight: float
    packer: Any


class Sample(NamedTuple):
    source: int
    pieces: Pieces


class Mix:
    def __init__(
        self,
        sources: list[Source],
        seed: int,
        tokenizer: StoredTokenizer | None = None,
        epochs_to_take: Epochs | None = None,
    ):
        """tokenizer: that of all sources, as the first of chats has it, or else the first; None for random tokens.
        epochs_to_take: None if the samples never end."""
        self.sources, self.tokenizer, self._key = sources, tokenizer, key("mix", seed)
        self.epochs_to_take = epochs_to_take
        weight_K = np.array([source.weight for source in sources])
        self._threshold_K = np.cumsum(weight_K / weight_K.sum())[:-1]

    def take(self, first: int, count: int) -> list[Sample | None]:
        """Samples first, first + 1, ... of the run; each is taken once, in this order. None: after the last."""
        turn_N = self._turns(first, count)
        count_K = np.bincount(turn_N[turn_N >= 0], minlength=len(self.sources)).tolist()
        queues = [iter(source.packer.take(n)) for source, n in zip(self.sources, count_K, strict=True)]
        return [None if turn < 0 else Sample(turn, next(queues[turn])) for turn in turn_N.tolist()]

    def _turns(self, first: int, count: int) -> np.ndarray:
        """The source of each."""
        if self.epochs_to_take:
            return self.epochs_to_take.turns(first, count)
        if len(self.sources) == 1:
            return np.zeros(count, np.int64)
        # The top 53 bits: a weight may be small.
        random_N = bits(self._key, torch.arange(first, first + count)).numpy().view(np.uint64) >> np.uint64(11)
        return np.searchsorted(self._threshold_K, random_N * 2.0**-53, side="right")

    def after(self, first: int, count: int) -> int:
        """The number of the next sample after these."""
        return min(first + count, self.epochs_to_take.total) if self.epochs_to_take else first + count

    def read(
        self, samples: list[Sample | None], seq_len: int, separate_documents: bool, with_weights: bool = False
    ) -> Arrays:
        """None stands for a sequence of padding only."""
        further = {WEIGHT: (np.dtype(np.float32), 2)} if with_weights else {}
        for source in self.sources:
            further |= further_of(source.packer.documents) if hasattr(source.packer, "documents") else {}
        branches = any(getattr(source.packer, "share", False) for source in self.sources)
        out = empty(len(samples), seq_len, separate_documents, further, branches)
        for n, sample in enumerate(samples):
            if sample is not None:
                self.sources[sample.source].packer.fill(sample.pieces, out, n)
        return out

    def lengths(self, samples: list[Sample | None]) -> list[np.ndarray]:
        """Of the documents in each sample, as far as they attend."""
        lengths = [
            iter(source.packer.lengths([sample.pieces for sample in samples if sample and sample.source == k]))
            for k, source in enumerate(self.sources)
        ]
        return [next(lengths[sample.source]) if sample else np.zeros(0, np.int64) for sample in samples]

    def lost(self) -> dict[str, str]:
        """Return the header's rows on pairs and chats of which something is cut or left out."""
        rows: dict[str, str] = {}
        for packer in (source.packer for source in self.sources):
            if line := getattr(packer, "note", ""):
                rows[packer.note_row] = "\n".join(filter(None, (rows.get(packer.note_row), line)))
        return rows

    @property
    def epochs(self) -> dict[str, float]:
        """How many times each source has been read; endless sources are left out."""
        return {s.name: s.packer.epochs for s in self.sources if s.packer.epochs is not None}

    @property
    def state(self) -> list[list[int]]:
        return [source.packer.state for source in self.sources]

    @state.setter
    def state(self, state: list[list[int]]) -> None:
        for source, packer_state in zip(self.sources, state, strict=True):
            source.packer.state = packer_state
