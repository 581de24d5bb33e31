"""The order of a run of whole epochs (training.epochs): how many sequences each source has, and which source is next.

Epochs follow one another. In an epoch every sequence of every source comes once: the sources are interleaved by a
counted permutation, and each source gives its sequences in its packer's order. After the last epoch there is only
padding. Nothing depends on ranks or batch sizes. Best fit must pack an epoch to know its number of sequences; these
numbers are stored in `sequences.json` beside the shards.

Shapes: E epochs, K sources, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from titanmoe.config.parse_json import parse_json
from titanmoe.data.documents import stored_documents
from titanmoe.data.pack import BUFFER, ORDER, BestFitPacker, StreamPacker
from titanmoe.data.shuffle import permute
from titanmoe.data.write_token_shards import write_json
from titanmoe.ops.counter_rng import key

FILE = "sequences.json"


class EpochOrder:
    """The order of the sources over a fixed number of epochs; `count_EK` has each source's sequences in each epoch."""

    def __init__(self, count_EK: Sequence[Sequence[int]], seed: int):
        self.count_EK, self.seed = np.array(count_EK, np.int64), seed
        self.end_E = np.cumsum(self.count_EK.sum(1))

    @property
    def total(self) -> int:
        """Number of sequences in all epochs."""
        return int(self.end_E[-1])

    def source_indices(self, first: int, count: int) -> np.ndarray:
        """Return the source (N,) of each of `count` samples from number `first` on; -1 after the last sample."""
        number_N = np.arange(first, first + count)
        epoch_N, source_N = np.searchsorted(self.end_E, number_N, side="right"), np.full(count, -1)
        for epoch in np.unique(epoch_N[epoch_N < len(self.end_E)]).tolist():
            in_epoch_N = epoch_N == epoch
            count_K, end = self.count_EK[epoch], int(self.end_E[epoch])
            size = int(count_K.sum())
            place_N = permute(key("epoch", self.seed, epoch), number_N[in_epoch_N] - (end - size), size)
            source_N[in_epoch_N] = np.searchsorted(np.cumsum(count_K), place_N, side="right")
        return source_N


def count_sequences(packer: StreamPacker | BestFitPacker, epochs: int) -> list[int]:
    """Return the number of packed sequences in each of the first `epochs` epochs of a source.

    Those of a stream are equal. Best fit reads them from `sequences.json` beside token shards, or packs each epoch
    (reading lengths only) and writes them there if it can.
    """
    if isinstance(packer, StreamPacker):
        return [packer.per_epoch] * epochs
    source = stored_documents(packer.documents)
    file = source.folder / FILE if hasattr(source, "folder") else None  # None for no token shards
    packing = f"{packer.name} {ORDER} of {BUFFER}, seq_len {packer.seq_len}, seed {packer.seed}"
    name = f"{packer.documents.fingerprint}, {packing}"
    stored = _read_counts(file)
    counts = packer.count(epochs, stored.get(name, ()))
    if file is not None and len(counts) > len(stored.get(name, ())):
        with suppress(OSError):  # the folder is read-only: the next run counts again
            write_json(file, _read_counts(file) | {name: counts})
    return counts


def _read_counts(file: Path | None) -> dict[str, list[int]]:
    """Return the sequences of each epoch in `sequences.json`, by "FINGERPRINT, PACKING". Drops malformed entries.

    {} without a file, or if it cannot be read.
    """
    try:
        stored = parse_json(file.read_bytes()) if file else {}
    except (OSError, ValueError):
        return {}

    def is_sound(counts: Any) -> bool:
        return isinstance(counts, list) and all(type(count) is int and count > 0 for count in counts)

    return {name: counts for name, counts in stored.items() if is_sound(counts)} if isinstance(stored, dict) else {}
