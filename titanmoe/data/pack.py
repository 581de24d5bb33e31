"""From documents to sequences of S positions, in a shuffled order that needs no index.

stream      the sequence of all tokens is cut every S tokens, wherever that is, and the windows come in a counted order.
            In an epoch every token but the remainder is a label once; every epoch cuts at other places.
documents   the same windows, with the documents in them kept apart.
best_fit    documents come in a counted order, BUFFER at a time; those of one buffer are packed into as few sequences as
            greedy best fit finds, longest first, and these come in a counted order. The buffer bounds the memory.

A packer hands out pieces without reading anything; `fill` reads those of one sequence. What a packer hands out next is
a function of the seed and of its state, a few integers. A document of n tokens gives n - 1 pairs of a token and its
label: its end mark is a label and, where documents are packed whole, never an input.

Shapes: P pieces of one sequence, Q sequences of one buffer, S positions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from titanmoe.data.batch import ANSWER, KEPT, KEPT_LOG_P, PAIRS, REFERENCE, WEIGHT
from titanmoe.data.documents import Documents, document_of, is_masked, whole_of
from titanmoe.data.shuffle import permute
from titanmoe.ops.counter_rng import key
from titanmoe.tokens import IGNORE

BUFFER = 1024
"""Documents that best fit packs together."""
ORDER = 1
"""Another number when documents of the same lengths are packed in another way: how many sequences they make is kept
beside them (titanmoe.data.epochs)."""


class Pieces(NamedTuple):
    """One sequence: where its pieces begin in the sequence of all tokens, and how many pairs each has."""

    start_P: np.ndarray
    pairs_P: np.ndarray


class Arrays(NamedTuple):
    """N sequences on their way to a Batch."""

    tokens_NS: np.ndarray
    labels_NS: np.ndarray
    valid_NS: np.ndarray
    document_NS: np.ndarray | None
    position_NS: np.ndarray | None
    until_NS: np.ndarray | None
    """Where documents branch."""
    further: dict[str, np.ndarray]
    """As in Batch."""


def empty(
    count: int,
    seq_len: int,
    separate_documents: bool,
    further: Mapping[str, tuple[np.dtype, int]] = MappingProxyType({}),
    branches: bool = False,
) -> Arrays:
    """All padding: its document id is -1, and it sees itself alone where documents branch.

    further: of what else there is, its dtype, and whether it is a number per position (2) or per sequence (1).
    """
    shape = (count, seq_len)
    return Arrays(
        np.zeros(shape, np.int64),
        np.full(shape, IGNORE, np.int64),
        np.zeros(shape, bool),
        np.full(shape, -1, np.int64) if separate_documents else None,
        np.zeros(shape, np.int64) if separate_documents else None,
        np.tile(np.arange(1, seq_len + 1), (count, 1)) if branches else None,
        {name: np.zeros(shape[:dims], dtype) for name, (dtype, dims) in further.items()},
    )


def _fill_labels(documents: Documents, start: int, stop: int, out: Arrays, n: int, places: slice) -> None:
    """Tokens [start, stop) as pairs of a token and its label, what each label counts, and its score."""
    tokens, label_mask = documents.read(start, stop), documents.label_mask(start, stop)
    out.tokens_NS[n, places], out.labels_NS[n, places], out.valid_NS[n, places] = tokens[:-1], tokens[1:], True
    if label_mask is not None:
        out.labels_NS[n, places][~label_mask[1:]] = IGNORE
    if WEIGHT in out.further:
        weights = documents.label_weights(start, stop)
        out.further[WEIGHT][n, places] = 1 if weights is None else weights[1:]
    if REFERENCE in out.further:
        out.further[REFERENCE][n, places] = documents.scores(start, stop)[1:]
    if KEPT in out.further:
        kept = documents.kept(start + 1, stop)
        out.further[KEPT][n, places] = kept["ids"]
        # Every sequence of a first epoch was scored. Where documents are cut elsewhere a few labels were not: of these
        # the teacher says nothing.
        out.further[KEPT_LOG_P][n, places] = np.where(np.isnan(kept["log_p"]), -np.inf, kept["log_p"])


def further_of(documents: Documents) -> dict[str, tuple[np.dtype, int]]:
    """What else there is of their tokens, as `empty` takes it."""
    whole = whole_of(documents)
    scores, kept = (getattr(whole, name, None) for name in ("stored_scores", "kept_scores"))
    fields = {REFERENCE: (scores.dtype, 2)} if scores else {}
    if kept:
        ids, log_p = kept.dtype["ids"], kept.dtype["log_p"]
        fields |= {KEPT: (np.dtype((np.int64, ids.shape)), 2), KEPT_LOG_P: (log_p, 2)}
    return fields | ({ANSWER: (np.dtype(np.int64), 2), PAIRS: (np.dtype(np.int64), 1)} if documents.answers > 1 else {})


class Stream:
    note_row = "cut chats"

    def __init__(self, documents: Documents, seq_len: int, seed: int, separate_documents: bool):
        self.documents, self.seq_len, self.seed, self.separate_documents = documents, seq_len, seed, separate_documents
        self.pairs = max(0, int(documents.starts[len(documents)]) - 1)
        self.per_epoch = self.pairs // seq_len
        self.sequences_taken = 0

    @property
    def note(self) -> str:
        """A line for the header on chats, which windows cut anywhere; "" if every token is a label."""
        if not is_masked(self.documents):
            return ""
        return (
            f"{self.documents.name}: cut wherever a sample of {self.seq_len:,} tokens ends, so that answers may be "
            'without their questions; data.packing = "best_fit" keeps chats whole'
        )

    def count(self, epochs: int) -> list[int]:
        """How many sequences each of the first epochs has."""
        return [self.per_epoch] * epochs

    def take(self, count: int) -> list[Pieces]:
        number_N = np.arange(self.sequences_taken, self.sequences_taken + count)
        self.sequences_taken += count
        start_N = np.empty_like(number_N)
        for epoch in np.unique(number_N // self.per_epoch).tolist():
            in_epoch_N = number_N // self.per_epoch == epoch
            start_N[in_epoch_N] = self._starts(epoch, number_N[in_epoch_N] % self.per_epoch)
        whole_1 = np.array([self.seq_len])
        return [Pieces(start_N[i : i + 1], whole_1) for i in range(count)]

    def _starts(self, epoch: int, number_N: np.ndarray) -> np.ndarray:
        order = key("windows", self.seed, epoch)
        slack = self.pairs - self.per_epoch * self.seq_len
        return permute(order, number_N, self.per_epoch) * self.seq_len + order % (slack + 1)

    def first_epoch(self) -> Iterator[Pieces]:
        """The whole first epoch."""
        self.sequences_taken = 0
        while self.sequences_taken < self.per_epoch:
            yield from self.take(min(BUFFER, self.per_epoch - self.sequences_taken))

    @property
    def epochs(self) -> float:
        return self.sequences_taken / self.per_epoch

    @property
    def state(self) -> list[int]:
        return [self.sequences_taken]

    @state.setter
    def state(self, state: list[int]) -> None:
        (self.sequences_taken,) = state

    def _document_begins(self, start_N: np.ndarray) -> Iterator[np.ndarray]:
        """Where other documents begin in the windows that start there, up to the last label."""
        first_N, last_N = (document_of(self.documents, start_N + offset) + 1 for offset in (0, self.seq_len))
        starts = self.documents.starts
        for start, first, last in zip(start_N.tolist(), first_N.tolist(), last_N.tolist(), strict=True):
            yield np.unique(np.asarray(starts[first:last]).astype(np.int64)) - start

    def lengths(self, sequences: list[Pieces]) -> list[np.ndarray]:
        """Of whatever attends within itself."""
        if not self.separate_documents:
            return [pieces.pairs_P for pieces in sequences]
        windows = self._document_begins(np.array([pieces.start_P[0] for pieces in sequences], np.int64))
        return [np.diff(begins[begins < self.seq_len], prepend=0, append=self.seq_len) for begins in windows]

    def fill(self, pieces: Pieces, out: Arrays, n: int) -> None:
        start = int(pieces.start_P[0])
        stop = start + self.seq_len + 1
        _fill_labels(self.documents, start, stop, out, n, slice(None))
        if self.separate_documents:
            (begins,) = self._document_begins(pieces.start_P)
            out.labels_NS[n, begins - 1] = IGNORE  # the token after a document's end belongs to the next
            begins = np.append(0, begins[begins < self.seq_len])
            document_S = np.searchsorted(begins, np.arange(self.seq_len), side="right") - 1
            out.document_NS[n], out.position_NS[n] = document_S, np.arange(self.seq_len) - begins[document_S]


class PackedBuffer:
    """The sequences of one buffer, in order. Full pieces, of which long documents make many, are stored as numbers."""

    def __init__(self, begin_Q: np.ndarray, whole_1: np.ndarray, bins: list[Pieces], order_Q: np.ndarray):
        self.begin_Q, self.whole_1, self.bins, self.order_Q = begin_Q, whole_1, bins, order_Q

    def __len__(self) -> int:
        return len(self.order_Q)

    def __getitem__(self, which: slice) -> list[Pieces]:
        return [self._sequence(i) for i in self.order_Q[which].tolist()]

    def _sequence(self, i: int) -> Pieces:
        full = len(self.begin_Q)
        return Pieces(self.begin_Q[i : i + 1], self.whole_1) if i < full else self.bins[i - full]


class BestFit:
    name = "best_fit"

    def __init__(self, documents: Documents, seq_len: int, seed: int):
        self.documents, self.seq_len, self.seed = documents, seq_len, seed
        self.pairs = max(0, int(documents.starts[len(documents)]) - len(documents))
        self.buffers = -(-len(documents) // BUFFER)
        self.state = [0, 0, 0]

    @property
    def per_epoch(self) -> int:
        """At least this many sequences: the number without padding."""
        return -(-self.pairs // self.seq_len)

    @property
    def state(self) -> list[int]:
        """Epoch, buffer, and sequences taken from it."""
        return [self.epoch, self.buffer, self.sequences_taken]

    @state.setter
    def state(self, state: list[int]) -> None:
        self.epoch, self.buffer, self.sequences_taken = state
        self._packed: PackedBuffer | None = None

    @property
    def epochs(self) -> float:
        share = self.sequences_taken / len(self._packed) if self._packed else 0.0
        return self.epoch + (self.buffer + share) / self.buffers

    def count(self, epochs: int, known: Sequence[int] = ()) -> list[int]:
        """How many sequences each of the first epochs has. known: of the first ones."""
        state, counts = self.state, list(known[:epochs])
        for epoch in range(len(counts), epochs):
            counts.append(0)
            for buffer in range(self.buffers):
                self.state = [epoch, buffer, 0]
                counts[-1] += len(self._pack())
        self.state = state
        return counts

    def take(self, count: int) -> list[Pieces]:
        out: list[Pieces] = []
        while len(out) < count:
            if self._packed is None:
                self._packed = self._pack()
            new = self._packed[self.sequences_taken : self.sequences_taken + count - len(out)]
            out += new
            self.sequences_taken += len(new)
            if self.sequences_taken == len(self._packed):
                onward = self.epoch * self.buffers + self.buffer + 1
                self.state = [*divmod(onward, self.buffers), 0]
        return out

    def first_epoch(self) -> Iterator[Pieces]:
        """The whole first epoch."""
        for buffer in range(self.buffers):
            self.state = [0, buffer, 0]
            yield from self._pack()[:]

    def _pack(self) -> PackedBuffer:
        """The sequences of this buffer."""
        number = np.arange(self.buffer * BUFFER, min((self.buffer + 1) * BUFFER, len(self.documents)))
        document = permute(key("documents", self.seed, self.epoch), number, len(self.documents))
        start = np.asarray(self.documents.starts[document]).astype(np.int64)
        pairs = self._pairs_of(document, start)
        start, pairs = start[pairs > 0], pairs[pairs > 0]
        whole, rest = pairs // self.seq_len, pairs % self.seq_len
        piece = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
        begin = np.repeat(start, whole) + piece * self.seq_len
        short = np.flatnonzero(rest)
        short = short[np.argsort(-rest[short], kind="stable")]
        start, rest = (start + whole * self.seq_len)[short], rest[short]
        bins = [Pieces(start[bin], rest[bin]) for bin in best_fit(rest.tolist(), self.seq_len)]
        count = len(begin) + len(bins)
        order = key("sequences", self.seed, self.epoch, self.buffer)
        return PackedBuffer(begin, np.array([self.seq_len]), bins, permute(order, np.arange(count), count))

    def _pairs_of(self, document_D: np.ndarray, start_D: np.ndarray) -> np.ndarray:
        """Return how many positions each of these documents takes."""
        return np.asarray(self.documents.starts[document_D + 1]).astype(np.int64) - start_D - 1

    def lengths(self, sequences: list[Pieces]) -> list[np.ndarray]:
        return [pieces.pairs_P for pieces in sequences]

    def fill(self, pieces: Pieces, out: Arrays, n: int) -> None:
        first = 0
        for i, (start, pairs) in enumerate(zip(pieces.start_P.tolist(), pieces.pairs_P.tolist(), strict=True)):
            piece, stop = slice(first, first + pairs), start + pairs + 1
            _fill_labels(self.documents, start, stop, out, n, piece)
            out.document_NS[n, piece], out.position_NS[n, piece] = i, np.arange(pairs)
            first += pairs


def best_fit(sizes: list[int], room: int) -> list[list[int]]:
    """Bins of the numbers of these sizes, with each size in the fullest bin that still has room for it."""
    bins: list[list[int]] = []
    bins_with_room: list[tuple[int, int]] = []  # for each bin that is not full: its room, its number
    for i, size in enumerate(sizes):
        at = bisect_left(bins_with_room, (size, -1))
        if at < len(bins_with_room):
            free, bin = bins_with_room.pop(at)
            bins[bin].append(i)
        else:
            free, bin = room, len(bins)
            bins.append([i])
        if free > size:
            insort(bins_with_room, (free - size, bin))
    return bins
