"""The split of a source into training and validation documents (validation.held_out).

Each side is a view of the source: no tokens are copied, and each range of consecutive documents costs three integers.

Shapes: R ranges of consecutive documents, N documents that are looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from titanmoe.data.documents import Documents, split_by_shard


def split_held_out(documents: Documents, every: int, min_tokens: int) -> tuple[DocumentSubset, DocumentSubset]:
    """Split a source into training documents and every `every`-th document (or preference pair), which is held out.

    A source of fewer than `every` documents (not pairs), such as one text file, holds out the last 1 / `every` of its
    tokens instead, rounded down, provided that these are at least `min_tokens`; otherwise nothing.

    Returns:
        The training documents, and the held-out ones.
    """
    total, size = int(documents.starts[len(documents)]), documents.completions_per_prompt
    if size == 1 and len(documents) < every and total // every >= min_tokens:
        starts, split_token = np.asarray(documents.starts[:]).astype(np.int64), total - total // every
        document = int(np.searchsorted(starts, split_token))  # split in two, so that the second begins there
        starts, which = np.insert(starts, document, split_token), f"the last {every}th of the tokens"
        first, border, end = np.array([[0], [document], [len(starts) - 1]])
        return (
            DocumentSubset(documents, first, border, f"without {which}", starts),
            DocumentSubset(documents, border, end, which, starts),
        )
    held_out = np.arange(every - 1, len(documents) // size, every) * size
    first, end = np.append(0, held_out + size), np.append(held_out, len(documents))
    nonempty = end > first
    return DocumentSubset(documents, first[nonempty], end[nonempty], f"without every {every}th"), DocumentSubset(
        documents, held_out, held_out + size, f"every {every}th"
    )


class DocumentSubset(Documents):
    """View of some ranges of a source's documents as a source.

    Args:
        parent: the source.
        first_R: first document of each range.
        end_R: one past the last document of each range.
        selection: text that says which documents these are, for the fingerprint and the description.
        starts: `Documents.starts` of the documents that the ranges count; None for the source's own.
    """

    def __init__(self, parent: Documents, first_R: np.ndarray, end_R: np.ndarray, selection: str, starts: Any = None):
        if not len(first_R):  # no documents: one empty range
            first_R = end_R = np.zeros(1, np.int64)
        self.parent, self.name = parent, parent.name
        self.completions_per_prompt, self.first_R = parent.completions_per_prompt, first_R
        self.fingerprint, self.description = f"{parent.fingerprint} {selection}", f"{parent.description}, {selection}"
        self.document_R = np.append(0, np.cumsum(end_R - first_R))
        self.parent_starts = parent.starts if starts is None else starts
        self.start_R = np.asarray(self.parent_starts[first_R]).astype(np.int64)
        length_R = np.asarray(self.parent_starts[end_R]).astype(np.int64) - self.start_R
        self.token_R = np.append(0, np.cumsum(length_R))

    def __len__(self) -> int:
        return int(self.document_R[-1])

    @property
    def starts(self) -> _Starts:
        return _Starts(self)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._concatenate(self.parent.read, start, stop)

    def label_mask(self, start: int, stop: int) -> np.ndarray | None:
        return self._concatenate(self.parent.label_mask, start, stop)

    def label_weights(self, start: int, stop: int) -> np.ndarray | None:
        return self._concatenate(self.parent.label_weights, start, stop)

    def reference_log_probs(self, start: int, stop: int) -> np.ndarray | None:
        return self._concatenate(self.parent.reference_log_probs, start, stop)

    def teacher_log_probs(self, start: int, stop: int) -> np.ndarray | None:
        return self._concatenate(self.parent.teacher_log_probs, start, stop)

    def stored_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [ends for a, b in self._parent_ranges(start, stop) for ends in self.parent.stored_ranges(a, b)]

    def _concatenate(self, read: Callable[[int, int], np.ndarray | None], start: int, stop: int) -> np.ndarray | None:
        """Return what `read`, a method of the parent, gives for tokens [start, stop) of this subset, or None."""
        arrays = [read(a, b) for a, b in self._parent_ranges(start, stop)]
        return arrays[0] if len(arrays) == 1 or arrays[0] is None else np.concatenate(arrays)

    def _parent_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return where tokens [start, stop) of this subset are in the parent, as ranges of the parent's tokens.

        [(0, 0)] if start is not below stop.
        """
        ranges = split_by_shard(self.token_R, start, stop)
        return [(int(self.start_R[r]) + begin, int(self.start_R[r]) + end) for r, begin, end in ranges] or [(0, 0)]


class _Starts:
    """The first token of each document of a subset, then the number of all tokens; computed when it is indexed."""

    def __init__(self, subset: DocumentSubset):
        self.subset = subset

    def __len__(self) -> int:
        return len(self.subset) + 1

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            which = np.arange(*which.indices(len(self)))
        subset = self.subset
        document_N = np.atleast_1d(np.asarray(which, dtype=np.int64))
        document_N = np.where(document_N < 0, document_N + len(self), document_N)
        # The end of the last document belongs to the last range.
        range_N = np.searchsorted(subset.document_R[:-1], document_N, side="right") - 1
        inner_N = subset.first_R[range_N] + document_N - subset.document_R[range_N]
        start_N = np.asarray(subset.parent_starts[inner_N]).astype(np.int64)
        start_N += subset.token_R[range_N] - subset.start_R[range_N]
        return start_N if isinstance(which, np.ndarray | list) else int(start_N[0])
