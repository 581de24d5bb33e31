"""Some documents of a source as a source of their own: what is trained on, and what is kept for validation.

Neither tokens nor starts are copied; it stores three integers per run of neighbouring documents.

Shapes: R runs, N documents asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from titanmoe.data.documents import Documents


def split(documents: Documents, every: int, least: int) -> tuple[DocumentRange, DocumentRange]:
    """All but every n-th document, or pair of answers, and every n-th.

    Of fewer than n documents, such as a single file of text: all but the last n-th of the tokens, and that, if it has
    `least` tokens.
    """
    total, size = int(documents.starts[len(documents)]), documents.answers
    if size == 1 and len(documents) < every and total // every >= least:
        cut = Cut(documents, total - total // every)
        first, border, end = np.array([[0], [cut.document], [len(cut)]])
        which = f"the last {every}th of the tokens"
        return DocumentRange(cut, first, border, f"without {which}"), DocumentRange(cut, border, end, which)
    held_out = np.arange(every - 1, len(documents) // size, every) * size
    first, end = np.append(0, held_out + size), np.append(held_out, len(documents))
    nonempty = end > first
    return DocumentRange(documents, first[nonempty], end[nonempty], f"without every {every}th"), DocumentRange(
        documents, held_out, held_out + size, f"every {every}th"
    )


class Cut:
    """The same tokens with one document more: a new one begins at token `at`. For few documents."""

    def __init__(self, whole: Documents, at: int):
        self.whole, self.name, self.vocab_size, self.answers = whole, whole.name, whole.vocab_size, whole.answers
        self.fingerprint, self.description = whole.fingerprint, whole.description
        starts = np.asarray(whole.starts[np.arange(len(whole) + 1)]).astype(np.int64)
        self.document = int(np.searchsorted(starts, at))
        self.starts = np.insert(starts, self.document, at)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.whole.read(start, stop)

    def label_mask(self, start: int, stop: int) -> np.ndarray | None:
        return self.whole.label_mask(start, stop)

    def label_weights(self, start: int, stop: int) -> np.ndarray | None:
        return self.whole.label_weights(start, stop)

    def scores(self, start: int, stop: int) -> np.ndarray | None:
        return self.whole.scores(start, stop)

    def kept(self, start: int, stop: int) -> np.ndarray | None:
        return self.whole.kept(start, stop)

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        return self.whole.ranges(start, stop)


class DocumentRange:
    """Documents [first, end) of each run."""

    def __init__(self, whole: Documents, first_R: np.ndarray, end_R: np.ndarray, which: str):
        if not len(first_R):  # no documents: one empty run
            first_R = end_R = np.zeros(1, np.int64)
        self.whole, self.first_R = whole, first_R
        self.name, self.vocab_size, self.answers = whole.name, whole.vocab_size, whole.answers
        self.fingerprint, self.description = f"{whole.fingerprint} {which}", f"{whole.description}, {which}"
        self.document_R = _cumulative(end_R - first_R)
        self.start_R = np.asarray(whole.starts[first_R]).astype(np.int64)
        self.token_R = _cumulative(np.asarray(whole.starts[end_R]).astype(np.int64) - self.start_R)

    def __len__(self) -> int:
        return int(self.document_R[-1])

    @property
    def starts(self) -> _Starts:
        return _Starts(self)

    def read(self, start: int, stop: int) -> np.ndarray:
        parts = [self.whole.read(a, b) for a, b in self._ranges(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def label_mask(self, start: int, stop: int) -> np.ndarray | None:
        return self._joined(self.whole.label_mask, start, stop)

    def label_weights(self, start: int, stop: int) -> np.ndarray | None:
        return self._joined(self.whole.label_weights, start, stop)

    def scores(self, start: int, stop: int) -> np.ndarray | None:
        return self._joined(self.whole.scores, start, stop)

    def kept(self, start: int, stop: int) -> np.ndarray | None:
        return self._joined(self.whole.kept, start, stop)

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [ends for a, b in self._ranges(start, stop) for ends in self.whole.ranges(a, b)]

    def _joined(self, read: Callable[[int, int], np.ndarray | None], start: int, stop: int) -> np.ndarray | None:
        parts = [read(a, b) for a, b in self._ranges(start, stop)]
        return None if parts[0] is None else np.concatenate(parts)

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where these tokens are in the whole sequence."""
        run = int(np.searchsorted(self.token_R, start, side="right")) - 1
        out = []
        while start < stop:
            run_start, run_end = int(self.token_R[run]), int(self.token_R[run + 1])
            if start < run_end:
                first, count = int(self.start_R[run]) + start - run_start, min(stop, run_end) - start
                out.append((first, first + count))
                start += count
            run += 1
        return out or [(0, 0)]


class _Starts:
    def __init__(self, part: DocumentRange):
        self.part = part

    def __len__(self) -> int:
        return len(self.part) + 1

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            which = np.arange(*which.indices(len(self)))
        part = self.part
        document_N = np.atleast_1d(np.asarray(which, dtype=np.int64))
        document_N = np.where(document_N < 0, document_N + len(self), document_N)
        # The end of the last document belongs to the last run.
        run_N = np.searchsorted(part.document_R[:-1], document_N, side="right") - 1
        inner_N = part.first_R[run_N] + document_N - part.document_R[run_N]
        start_N = np.asarray(part.whole.starts[inner_N]).astype(np.int64) - part.start_R[run_N] + part.token_R[run_N]
        return start_N if isinstance(which, np.ndarray | list) else int(start_N[0])


def _cumulative(count_R: np.ndarray) -> np.ndarray:
    return np.append(0, np.cumsum(count_R))
