"""Packing of preference pairs: both completions of a pair, each after its prompt, lie in the same sequence.

With data.share_prefixes the common beginning of both, up to the first label of either, is stored once and both continue
from it (titanmoe.mask). The last token of the prompt predicts the first token of each completion, so it is stored for
each. If a pair does not fit, the longer completion is truncated; a pair is left out if nothing of a completion remains,
or nothing in which both differ.

Shapes: P pairs, 2 their completions, X segments of a pair (two, or three where prefixes are shared and come first), G
segments of a sequence, N sequences, S positions.
"""

from __future__ import annotations

import numpy as np

from titanmoe.data.batch import COMPLETION, PAIRS
from titanmoe.data.documents import Documents
from titanmoe.data.lengths import describe_needed
from titanmoe.data.pack import BUFFER, BatchArrays, BestFitPacker, PackedBuffer, Segments, pack_best_fit
from titanmoe.data.shuffle import permute
from titanmoe.mask import branches
from titanmoe.ops.counter_rng import key


class PreferencePacker(BestFitPacker):
    """Packer that puts preference pairs into few sequences by best fit, and never splits a pair."""

    note_row = "pairs"

    def __init__(self, documents: Documents, seq_len: int, seed: int, share_prefixes: bool = False):
        super().__init__(documents, seq_len, seed)
        self.share_prefixes, self.name = share_prefixes, "best_fit, prefixes shared" if share_prefixes else "best_fit"
        start = np.asarray(documents.starts[:]).astype(np.int64)
        self.start_P2, self.length_P2 = start[:-1].reshape(-1, 2), np.diff(start).reshape(-1, 2) - 1
        self.num_pairs = len(self.start_P2)
        self.buffers = -(-self.num_pairs // BUFFER)
        self.shared_P = np.array(
            [self._shared_length(n) if share_prefixes else 0 for n in range(self.num_pairs)], np.int64
        )
        self.needed_P = self._positions(slice(None))
        """Positions that each pair would fill if it were not truncated."""
        long_P = self.needed_P > seq_len
        for pair in np.flatnonzero(long_P).tolist():
            self._truncate(pair)
        self.num_left_out, self.num_truncated = int((self.length_P2.sum(1) == 0).sum()), int(long_P.sum())
        self.num_truncated -= self.num_left_out
        self.pairs = int(self._positions(slice(None)).sum())

    @property
    def note(self) -> str:
        """Line for the log's header about pairs that were truncated or left out; "" if there are none."""
        changes = [f"{self.num_left_out:,} left out, whose completions are empty or equal once truncated"] * (
            self.num_left_out > 0
        )
        changes += [f"{self.num_truncated:,} with a truncated completion"] * (self.num_truncated > 0)
        return (
            f"{self.documents.name}: of {self.num_pairs:,}, {', '.join(changes)} (seq_len {self.seq_len}); "
            f"{describe_needed(self.needed_P[self.needed_P > self.seq_len], self.num_pairs)}"
            if changes
            else ""
        )

    def needed_lengths(self, count: int) -> np.ndarray:
        return self.needed_P[:count]

    def describe_long(self, count: int) -> str:
        long_P = self.needed_P[:count] > self.seq_len
        out = int((self.length_P2[:count].sum(1)[long_P] == 0).sum())
        return f"{out:,} left out, {int(long_P.sum()) - out:,} with a truncated completion"

    def _positions(self, pairs: np.ndarray | slice) -> np.ndarray:
        """Return the positions that each of these pairs fills, by the pairs' numbers or a slice."""
        return self.length_P2[pairs].sum(1) - self.shared_P[pairs]

    def _shared_length(self, pair: int) -> int:
        """Return how many first positions, without labels, both completions of pair number `pair` share."""
        both, shortest = self._token_ranges(pair), int(self.length_P2[pair].min())
        first, second = (self.documents.read(*one)[:shortest] for one in both)
        labelled = [self.documents.label_mask(*one)[1 : shortest + 1] for one in both]
        return int(np.append((first == second) & ~labelled[0] & ~labelled[1], False).argmin())

    def _token_ranges(self, pair: int) -> list[tuple[int, int]]:
        """Return the tokens [start, stop) of both documents of pair number `pair`, up to where they are truncated."""
        start_2, length_2 = self.start_P2[pair], self.length_P2[pair]
        return list(zip(start_2.tolist(), (start_2 + length_2 + 1).tolist(), strict=True))

    def _truncate(self, pair: int) -> None:
        """Truncate completions of pair number `pair`, which does not fit, the longer one first.

        Sets `length_P2`. The pair is left out, with 0 there and in `shared_P`, if nothing usable remains.
        """
        length_2, room = self.length_P2[pair], self.seq_len + int(self.shared_P[pair])
        shorter = int(length_2.argmin())
        length_2[shorter] = min(length_2[shorter], room // 2)
        length_2[1 - shorter] = room - length_2[shorter]
        both = self._token_ranges(pair)
        have_labels = all(self.documents.label_mask(*one)[1:].any() for one in both)
        if not have_labels or np.array_equal(*(self.documents.read(*one) for one in both)):
            length_2[:] = self.shared_P[pair] = 0

    def _pack(self) -> PackedBuffer:
        number = np.arange(self.buffer * BUFFER, min((self.buffer + 1) * BUFFER, self.num_pairs))
        pair_P = permute(key("documents", self.seed, self.epoch), number, self.num_pairs)
        size = self._positions(pair_P)
        pair_P = pair_P[np.argsort(-size, kind="stable")][: int((size > 0).sum())]
        packed = pack_best_fit(self._positions(pair_P).tolist(), self.seq_len)
        segments = [self._segments_of(pair_P[items]) for items in packed]
        order = key("sequences", self.seed, self.epoch, self.buffer)
        none = np.empty(0, np.int64)
        return PackedBuffer(none, none, segments, permute(order, np.arange(len(segments)), len(segments)))

    def _segments_of(self, pair_P: np.ndarray) -> Segments:
        """Return the plan of a sequence of pairs, by their numbers: for each its shared prefix, then both completions.

        Without data.share_prefixes there are no prefixes.
        """
        start_P2, length_P2, shared_P1 = self.start_P2[pair_P], self.length_P2[pair_P], self.shared_P[pair_P, None]
        if self.share_prefixes:
            start_P2 = np.concatenate([start_P2[:, :1], start_P2 + shared_P1], 1)
            length_P2 = np.concatenate([shared_P1, length_P2 - shared_P1], 1)
        return Segments(start_P2.ravel(), length_P2.ravel())

    def fill(self, segments: Segments, out: BatchArrays, n: int) -> None:
        super().fill(segments, out, n)
        length_PX = segments.pairs_G.reshape(-1, 3 if self.share_prefixes else 2)
        completion_P2, filled = np.arange(2 * len(length_PX)).reshape(-1, 2), slice(0, segments.pairs_G.sum())
        completion_PX = np.concatenate([completion_P2[:, : length_PX.shape[1] - 2], completion_P2], 1)
        out.extra_fields[COMPLETION][n, filled] = np.repeat(completion_PX.ravel(), segments.pairs_G)
        out.extra_fields[PAIRS][n] = len(length_PX)
        if self.share_prefixes:
            out.until_NS[n, filled], out.position_NS[n, filled] = branches(length_PX)
