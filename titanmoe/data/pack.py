"""Packing of documents into sequences of S positions, in a shuffled order that needs no index.

stream      all tokens, concatenated and split every S; windows come in shuffled order, each epoch splits elsewhere
documents   the same windows, with an attention mask that separates the documents in them
best_fit    greedy best-fit bin packing, longest first, of BUFFER documents at a time, in shuffled order

Called by titanmoe.data.sources. `take` plans sequences as lists of segments without reading a token, `fill` reads the
tokens of one. A document of n tokens gives n - 1 labels: its EOS is a label and, under best_fit, never an input.
Shapes: D documents of a buffer, G segments of one sequence, Q sequences of one buffer, S positions, N sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from titanmoe.data.batch import COMPLETION, PAIRS, REFERENCE, TEACHER_IDS, TEACHER_LOG_P, WEIGHT
from titanmoe.data.documents import Documents, find_documents, is_masked, stored_documents
from titanmoe.data.shuffle import permute
from titanmoe.ops.counter_rng import key
from titanmoe.tokens import IGNORE

BUFFER = 1024
"""Number of documents that best fit packs together."""
ORDER = 1
"""Version of the packing algorithm. Raise it when documents of the same lengths are packed differently: the number of
sequences is stored beside the shards (titanmoe.data.epochs)."""


class Segments(NamedTuple):
    """The plan of one sequence: the token ranges of the source that fill it, in order."""

    start_G: np.ndarray
    """First token of each range in the concatenation of all documents."""
    pairs_G: np.ndarray
    """Positions that each range fills: each is an input token, with the token after it as its label."""


class BatchArrays(NamedTuple):
    """N sequences as NumPy arrays, with the fields of titanmoe.data.batch.Batch."""

    tokens_NS: np.ndarray
    labels_NS: np.ndarray
    valid_NS: np.ndarray
    document_NS: np.ndarray | None
    position_NS: np.ndarray | None
    until_NS: np.ndarray | None
    extra_fields: dict[str, np.ndarray]


def empty_arrays(
    count: int,
    seq_len: int,
    separate_documents: bool,
    extra_fields: Mapping[str, tuple[np.dtype, int]] = MappingProxyType({}),
    branches: bool = False,
) -> BatchArrays:
    """Return arrays for `count` sequences, all padding, for packers to fill: token 0, label IGNORE, document id -1.

    Args:
        count: number of sequences.
        seq_len: positions of a sequence.
        separate_documents: whether to allocate document ids and positions, which are None otherwise.
        extra_fields: dtype of each extra field, and 2 if it has a value per position or 1 if it has one per sequence.
        branches: whether to allocate `until_NS`, by which padding attends to itself alone.
    """
    shape = (count, seq_len)
    return BatchArrays(
        tokens_NS=np.zeros(shape, np.int64),
        labels_NS=np.full(shape, IGNORE, np.int64),
        valid_NS=np.zeros(shape, bool),
        document_NS=np.full(shape, -1, np.int64) if separate_documents else None,
        position_NS=np.zeros(shape, np.int64) if separate_documents else None,
        until_NS=np.tile(np.arange(1, seq_len + 1), (count, 1)) if branches else None,
        extra_fields={name: np.zeros(shape[:dims], dtype) for name, (dtype, dims) in extra_fields.items()},
    )


def _fill_labels(documents: Documents, start: int, stop: int, out: BatchArrays, n: int, places: slice) -> None:
    """Read tokens [start, stop) into one sequence: inputs, labels, marks of valid positions, and extra fields.

    A label that the documents mask is IGNORE. Extra fields are those of each position's label: 1 for a weight that is
    not stored, -inf for a teacher's log-probability that is missing.

    Args:
        documents: the source.
        start: first token, in the concatenation of all documents.
        stop: one past the last token, which is a label only.
        out: arrays to write into.
        n: index of the sequence in `out`.
        places: positions of the sequence, one fewer than the tokens.
    """
    tokens, label_mask = documents.read(start, stop), documents.label_mask(start, stop)
    out.tokens_NS[n, places], out.labels_NS[n, places], out.valid_NS[n, places] = tokens[:-1], tokens[1:], True
    if label_mask is not None:
        out.labels_NS[n, places][~label_mask[1:]] = IGNORE
    if WEIGHT in out.extra_fields:
        weights = documents.label_weights(start, stop)
        out.extra_fields[WEIGHT][n, places] = 1 if weights is None else weights[1:]
    if REFERENCE in out.extra_fields:
        out.extra_fields[REFERENCE][n, places] = documents.reference_log_probs(start, stop)[1:]
    if TEACHER_IDS in out.extra_fields:
        teacher = documents.teacher_log_probs(start + 1, stop)
        out.extra_fields[TEACHER_IDS][n, places] = teacher["ids"]
        # Only the sequences of a first epoch were scored. Epochs that split documents elsewhere have a few labels
        # without scores (NaN), which get a log-probability of -inf.
        out.extra_fields[TEACHER_LOG_P][n, places] = np.where(np.isnan(teacher["log_p"]), -np.inf, teacher["log_p"])


def _document_lengths(documents: Documents, count: int) -> np.ndarray:
    """Return the number of positions of each of the first `count` documents: one fewer than its tokens."""
    return np.diff(np.asarray(documents.starts[: count + 1]).astype(np.int64)) - 1


def extra_field_specs(documents: Documents) -> dict[str, tuple[np.dtype, int]]:
    """Return (dtype, dimensions) of each extra field that these documents fill, by name, as `empty_arrays` takes them.

    2 dimensions are a value per position, 1 is a value per sequence. The fields are stored scores and those of
    preference pairs, but not label weights.
    """
    stored = stored_documents(documents)
    reference, teacher = stored.stored_reference_log_probs, stored.stored_teacher_log_probs
    fields = {REFERENCE: (reference.dtype, 2)} if reference else {}
    if teacher:
        ids, log_p = teacher.dtype["ids"], teacher.dtype["log_p"]
        fields |= {TEACHER_IDS: (np.dtype((np.int64, ids.shape)), 2), TEACHER_LOG_P: (log_p, 2)}
    return fields | (
        {COMPLETION: (np.dtype(np.int64), 2), PAIRS: (np.dtype(np.int64), 1)}
        if documents.completions_per_prompt > 1
        else {}
    )


class StreamPacker:
    """Packer that cuts the concatenated documents into windows of S tokens (data.packing = "stream" or "documents").

    With `separate_documents` it fills document ids and positions, so that documents do not attend to each other.
    """

    note_row = "cut chats"

    def __init__(self, documents: Documents, seq_len: int, seed: int, separate_documents: bool):
        self.documents, self.seq_len, self.seed, self.separate_documents = documents, seq_len, seed, separate_documents
        self.pairs = max(0, int(documents.starts[len(documents)]) - 1)
        self.per_epoch = self.pairs // seq_len
        self.sequences_taken = 0

    @property
    def note(self) -> str:
        """Line for the log's header: windows truncate these chats; "" if documents are texts, all tokens labels."""
        if not is_masked(self.documents):
            return ""
        return (
            f"{self.documents.name}: truncated wherever a sample of {self.seq_len:,} tokens ends, so an assistant "
            'message may be without its question; data.packing = "best_fit" keeps chats intact'
        )

    def needed_lengths(self, count: int) -> np.ndarray:
        """Return the number of positions of each of the first `count` documents: one fewer than its tokens."""
        return _document_lengths(self.documents, count)

    def describe_long(self, count: int) -> str:
        """Return text on what becomes of documents that are longer than a sequence, whatever `count` is."""
        return "documents are split wherever a sample ends"

    def take(self, count: int) -> list[Segments]:
        """Return the plans of the next `count` sequences, and advance the packer's state."""
        number_N = np.arange(self.sequences_taken, self.sequences_taken + count)
        self.sequences_taken += count
        start_N = np.empty_like(number_N)
        for epoch in np.unique(number_N // self.per_epoch).tolist():
            in_epoch_N = number_N // self.per_epoch == epoch
            start_N[in_epoch_N] = self._starts(epoch, number_N[in_epoch_N] % self.per_epoch)
        full_1 = np.array([self.seq_len])
        return [Segments(start_N[i : i + 1], full_1) for i in range(count)]

    def _starts(self, epoch: int, number_N: np.ndarray) -> np.ndarray:
        """Return the first token of each window of an epoch, by the windows' places in its shuffled order.

        All windows of an epoch are shifted by one number, drawn from the tokens that do not fill a window.
        """
        order = key("windows", self.seed, epoch)
        slack = self.pairs - self.per_epoch * self.seq_len
        return permute(order, number_N, self.per_epoch) * self.seq_len + order % (slack + 1)

    def first_epoch(self) -> Iterator[Segments]:
        """Yield the plans of all sequences of the first epoch. Resets and then advances the packer's state."""
        self.sequences_taken = 0
        while self.sequences_taken < self.per_epoch:
            yield from self.take(min(BUFFER, self.per_epoch - self.sequences_taken))

    @property
    def epochs(self) -> float:
        """Number of epochs read so far, with the fraction of the current one."""
        return self.sequences_taken / self.per_epoch

    @property
    def state(self) -> list[int]:
        """State to save: the number of sequences taken."""
        return [self.sequences_taken]

    @state.setter
    def state(self, state: list[int]) -> None:
        (self.sequences_taken,) = state

    def _document_begins(self, start_N: np.ndarray) -> Iterator[np.ndarray]:
        """Yield, for each window, the offsets (1 to S) in it at which a new document begins.

        Windows are given by their first token. S is the last label's offset. A document at offset 0 is not among them.
        """
        first_N, last_N = (find_documents(self.documents, start_N + offset) + 1 for offset in (0, self.seq_len))
        starts = self.documents.starts
        for start, first, last in zip(start_N.tolist(), first_N.tolist(), last_N.tolist(), strict=True):
            yield np.unique(np.asarray(starts[first:last]).astype(np.int64)) - start

    def lengths(self, sequences: list[Segments]) -> list[np.ndarray]:
        """Return the lengths of documents' parts in each planned sequence; S alone if they attend to each other."""
        if not self.separate_documents:
            return [segments.pairs_G for segments in sequences]
        windows = self._document_begins(np.array([segments.start_G[0] for segments in sequences], np.int64))
        return [np.diff(begins[begins < self.seq_len], prepend=0, append=self.seq_len) for begins in windows]

    def fill(self, segments: Segments, out: BatchArrays, n: int) -> None:
        """Write a planned sequence's tokens, labels, marks of valid positions and other fields into row n of `out`.

        With `separate_documents`, the last token of a document has no label.
        """
        start = int(segments.start_G[0])
        stop = start + self.seq_len + 1
        _fill_labels(self.documents, start, stop, out, n, slice(None))
        if self.separate_documents:
            (begins,) = self._document_begins(segments.start_G)
            out.labels_NS[n, begins - 1] = IGNORE  # the token after a document's end belongs to the next
            begins = np.append(0, begins[begins < self.seq_len])
            document_S = np.searchsorted(begins, np.arange(self.seq_len), side="right") - 1
            out.document_NS[n], out.position_NS[n] = document_S, np.arange(self.seq_len) - begins[document_S]


class PackedBuffer:
    """The planned sequences of one buffer of documents, in shuffled order; indexed by a slice.

    Sequences that one segment of a long document fills are stored as its first token alone (`begin_Q`), the others as
    Segments.
    """

    def __init__(self, begin_Q: np.ndarray, full_1: np.ndarray, packed: list[Segments], order_Q: np.ndarray):
        self.begin_Q, self.full_1, self.packed, self.order_Q = begin_Q, full_1, packed, order_Q

    def __len__(self) -> int:
        return len(self.order_Q)

    def __getitem__(self, which: slice) -> list[Segments]:
        full = len(self.begin_Q)
        return [
            Segments(self.begin_Q[i : i + 1], self.full_1) if i < full else self.packed[i - full]
            for i in self.order_Q[which].tolist()
        ]


class BestFitPacker:
    """Packer that puts unsplit documents into few sequences by best fit (data.packing = "best_fit").

    Documents longer than S are split into full sequences and a rest, which is packed.
    """

    name = "best_fit"

    def __init__(self, documents: Documents, seq_len: int, seed: int):
        self.documents, self.seq_len, self.seed = documents, seq_len, seed
        self.pairs = max(0, int(documents.starts[len(documents)]) - len(documents))
        self.buffers = -(-len(documents) // BUFFER)
        self.state = [0, 0, 0]

    @property
    def per_epoch(self) -> int:
        """Lower bound of the sequences of an epoch: how many there would be without padding, rounded up."""
        return -(-self.pairs // self.seq_len)

    @property
    def state(self) -> list[int]:
        """State to save: epoch, buffer of the epoch, and sequences taken from the buffer."""
        return [self.epoch, self.buffer, self.sequences_taken]

    @state.setter
    def state(self, state: list[int]) -> None:
        self.epoch, self.buffer, self.sequences_taken = state
        self._packed: PackedBuffer | None = None

    @property
    def epochs(self) -> float:
        """Number of epochs read so far, with the fraction of the current one."""
        fraction = self.sequences_taken / len(self._packed) if self._packed else 0.0
        return self.epoch + (self.buffer + fraction) / self.buffers

    def needed_lengths(self, count: int) -> np.ndarray:
        """Return the positions that each of the first `count` documents, or pairs, would fill in one sequence."""
        return _document_lengths(self.documents, count)

    def describe_long(self, count: int) -> str:
        """Return text on what becomes of documents that are longer than a sequence.

        Here it is the same for any `count`; subclasses give numbers of those among the first `count`.
        """
        return "longer ones are split into full samples and a rest"

    def count(self, epochs: int, known: Sequence[int] = ()) -> list[int]:
        """Return the number of sequences in each of the first `epochs` epochs. Packs, but reads only lengths.

        `known` has the numbers of the first of these epochs, which are not packed again.
        """
        state, counts = self.state, list(known[:epochs])
        for epoch in range(len(counts), epochs):
            counts.append(0)
            for buffer in range(self.buffers):
                self.state = [epoch, buffer, 0]
                counts[-1] += len(self._pack())
        self.state = state
        return counts

    def take(self, count: int) -> list[Segments]:
        """Return the plans of the next `count` sequences, and advance the packer's state."""
        out: list[Segments] = []
        while len(out) < count:
            if self._packed is None:
                self._packed = self._pack()
            new = self._packed[self.sequences_taken : self.sequences_taken + count - len(out)]
            out += new
            self.sequences_taken += len(new)
            if self.sequences_taken == len(self._packed):
                next_buffer = self.epoch * self.buffers + self.buffer + 1
                self.state = [*divmod(next_buffer, self.buffers), 0]
        return out

    def first_epoch(self) -> Iterator[Segments]:
        """Yield the plans of all sequences of the first epoch. Resets the packer's state; ends at the last buffer."""
        for buffer in range(self.buffers):
            self.state = [0, buffer, 0]
            yield from self._pack()[:]

    def _pack(self) -> PackedBuffer:
        """Return the planned sequences of the current buffer of documents. Reads document lengths only.

        The buffer has the next documents of the epoch's shuffled order; its sequences are shuffled too, so full ones
        of long documents and packed ones come mixed.
        """
        number = np.arange(self.buffer * BUFFER, min((self.buffer + 1) * BUFFER, len(self.documents)))
        document = permute(key("documents", self.seed, self.epoch), number, len(self.documents))
        start = np.asarray(self.documents.starts[document]).astype(np.int64)
        pairs = self._count_pairs(document, start)
        start, pairs = start[pairs > 0], pairs[pairs > 0]
        full, rest = pairs // self.seq_len, pairs % self.seq_len
        number = np.arange(full.sum()) - np.repeat(np.cumsum(full) - full, full)
        begin = np.repeat(start, full) + number * self.seq_len
        short = np.flatnonzero(rest)
        short = short[np.argsort(-rest[short], kind="stable")]
        start, rest = (start + full * self.seq_len)[short], rest[short]
        packed = [Segments(start[items], rest[items]) for items in pack_best_fit(rest.tolist(), self.seq_len)]
        count = len(begin) + len(packed)
        order = key("sequences", self.seed, self.epoch, self.buffer)
        return PackedBuffer(begin, np.array([self.seq_len]), packed, permute(order, np.arange(count), count))

    def _count_pairs(self, document_D: np.ndarray, start_D: np.ndarray) -> np.ndarray:
        """Return how many positions each document fills: one less than its tokens, since each needs a label.

        A document with 0 is left out. `start_D` is the index of each document's first token among all tokens.
        """
        return np.asarray(self.documents.starts[document_D + 1]).astype(np.int64) - start_D - 1

    def lengths(self, sequences: list[Segments]) -> list[np.ndarray]:
        """Return, for each planned sequence, the positions of each of its segments, such as whole documents."""
        return [segments.pairs_G for segments in sequences]

    def fill(self, segments: Segments, out: BatchArrays, n: int) -> None:
        """Write a planned sequence's tokens, labels, document ids, positions and other fields into row n of `out`."""
        first = 0
        for i, (start, pairs) in enumerate(zip(segments.start_G.tolist(), segments.pairs_G.tolist(), strict=True)):
            places, stop = slice(first, first + pairs), start + pairs + 1
            _fill_labels(self.documents, start, stop, out, n, places)
            out.document_NS[n, places], out.position_NS[n, places] = i, np.arange(pairs)
            first += pairs


def pack_best_fit(sizes: list[int], room: int) -> list[list[int]]:
    """Pack items into bins by best fit, and return the indices of the items of each bin.

    Each item goes into the fullest bin that still has room for it.

    Args:
        sizes: size of each item, at most `room`; sort them longest first for few bins.
        room: capacity of a bin.
    """
    packed: list[list[int]] = []
    with_room: list[tuple[int, int]] = []  # room and index of each bin that is not full
    for i, size in enumerate(sizes):
        at = bisect_left(with_room, (size, -1))
        if at < len(with_room):
            free, number = with_room.pop(at)
            packed[number].append(i)
        else:
            free, number = room, len(packed)
            packed.append([i])
        if free > size:
            insort(with_room, (free - size, number))
    return packed
