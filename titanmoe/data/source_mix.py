"""The mix of a run's sources: which source gives the next sample, and how far each has been read.

The source of sample n of the run is a function of (seed, n), and in a run of epochs also of the number of sequences of
each source. The sequence is the next one of that source's packer.

Shapes: N samples, K sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from titanmoe.data.batch import WEIGHT
from titanmoe.data.epochs import EpochOrder
from titanmoe.data.pack import BatchArrays, BestFitPacker, Segments, StreamPacker, empty_arrays, extra_field_specs
from titanmoe.data.token_shards import StoredTokenizer
from titanmoe.ops.counter_rng import bits, key

if TYPE_CHECKING:  # it imports this module
    from titanmoe.data.sources import SyntheticPacker

TRUNCATION_ROWS = "pairs", "long chats", "cut chats"
"""Rows of the run's header about data that is truncated or left out; they are logged as events, too."""


class Source(NamedTuple):
    """A source of training data: an entry of data.paths, its weight, and the packer that plans its sequences."""

    name: str
    fingerprint: str
    description: str
    weight: float
    """Relative weight: samples come from the sources in proportion to it."""
    packer: StreamPacker | BestFitPacker | SyntheticPacker


class Sample(NamedTuple):
    """The plan of one sample: the index of its source, and the token ranges that fill it."""

    source: int
    segments: Segments


class SourceMix:
    """All sources of a training job as one stream of samples.

    Args:
        sources: the sources.
        seed: seed of the order of the sources.
        tokenizer: that of the training data: of the first chats among token shards, or else of the first shards; None
            for random tokens and for validation.
        epoch_order: order of the sources if training.epochs is set; None if samples never end.
    """

    def __init__(
        self,
        sources: list[Source],
        seed: int,
        tokenizer: StoredTokenizer | None = None,
        epoch_order: EpochOrder | None = None,
    ):
        self.sources, self.tokenizer, self._key = sources, tokenizer, key("mix", seed)
        self.epoch_order = epoch_order
        weight_K = np.array([source.weight for source in sources])
        self._threshold_K = np.cumsum(weight_K / weight_K.sum())[:-1]

    def take(self, first: int, count: int) -> list[Sample | None]:
        """Return the plans of the `count` samples from number `first` on, counted since the start of training.

        None stands for padding after the last sample. Each sample must be taken once and in order, since packers
        advance.
        """
        source_N = self._source_indices(first, count)
        count_K = np.bincount(source_N[source_N >= 0], minlength=len(self.sources)).tolist()
        queues = [iter(source.packer.take(n)) for source, n in zip(self.sources, count_K, strict=True)]
        return [None if k < 0 else Sample(k, next(queues[k])) for k in source_N.tolist()]

    def _source_indices(self, first: int, count: int) -> np.ndarray:
        """Return the source (N,) of each of `count` samples from number `first` on; -1 after the last sample."""
        if self.epoch_order:
            return self.epoch_order.source_indices(first, count)
        if len(self.sources) == 1:
            return np.zeros(count, np.int64)
        # The top 53 bits: a weight may be small.
        random_N = bits(self._key, torch.arange(first, first + count)).numpy().view(np.uint64) >> np.uint64(11)
        return np.searchsorted(self._threshold_K, random_N * 2.0**-53, side="right")

    def next_sample(self, first: int, count: int) -> int:
        """Return the number of the sample after `count` samples from `first` on; with epochs at most their total."""
        return min(first + count, self.epoch_order.total) if self.epoch_order else first + count

    def read(
        self, samples: list[Sample | None], seq_len: int, separate_documents: bool, with_weights: bool = False
    ) -> BatchArrays:
        """Return the tokens and labels of planned samples as arrays; None becomes a sequence of padding.

        They have the extra fields of all sources, which are 0 in samples of a source without them.

        Args:
            samples: the plans.
            seq_len: positions of a sequence.
            separate_documents: whether documents of a sequence do not attend to each other.
            with_weights: whether to read the weights of labels.
        """
        extra_fields = {WEIGHT: (np.dtype(np.float32), 2)} if with_weights else {}
        for source in self.sources:
            extra_fields |= extra_field_specs(source.packer.documents) if hasattr(source.packer, "documents") else {}
        branches = any(getattr(source.packer, "share_prefixes", False) for source in self.sources)
        out = empty_arrays(len(samples), seq_len, separate_documents, extra_fields, branches)
        for n, sample in enumerate(samples):
            if sample is not None:
                self.sources[sample.source].packer.fill(sample.segments, out, n)
        return out

    def lengths(self, samples: list[Sample | None]) -> list[np.ndarray]:
        """Return the lengths, in positions, of each planned sample's documents; an empty array for padding.

        A sample whose documents attend to each other has a single length.
        """
        lengths = [
            iter(source.packer.lengths([sample.segments for sample in samples if sample and sample.source == k]))
            for k, source in enumerate(self.sources)
        ]
        return [next(lengths[sample.source]) if sample else np.zeros(0, np.int64) for sample in samples]

    def truncation_rows(self) -> dict[str, str]:
        """Return text for the log's header, by title (of TRUNCATION_ROWS), on data that is truncated or left out.

        A line per source whose packer has something to note; {} without.
        """
        rows: dict[str, str] = {}
        for packer in (source.packer for source in self.sources):
            if line := getattr(packer, "note", ""):
                rows[packer.note_row] = "\n".join(filter(None, (rows.get(packer.note_row), line)))
        return rows

    @property
    def epochs(self) -> dict[str, float]:
        """Number of epochs read of each source, by name; endless sources are left out."""
        return {s.name: s.packer.epochs for s in self.sources if s.packer.epochs is not None}

    @property
    def state(self) -> list[list[int]]:
        """State to save of each source's packer, in the order of `sources`; setting it continues from there."""
        return [source.packer.state for source in self.sources]

    @state.setter
    def state(self, state: list[list[int]]) -> None:
        for source, packer_state in zip(self.sources, state, strict=True):
            source.packer.state = packer_state
