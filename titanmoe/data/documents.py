"""What training reads, whatever the source: documents, concatenated into one long sequence of tokens.

A document's tokens include its end mark, and its begin mark if the tokenizer has one. Where the tokens are stored, in
memory or in shards on a disk, is up to the source: no caller asks for more than a few thousand of them at a time.

Shapes: N positions asked for.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np


class Documents(Protocol):
    name: str
    """As shown in logs and metrics."""
    fingerprint: str
    """Of the content; a resumed run compares it."""
    description: str
    """Where it comes from and how much it is, for a person."""
    vocab_size: int
    """One above the largest token id that may occur."""
    answers: int
    """2: documents 2 i and 2 i + 1 are a prompt with the chosen answer and with the rejected one; else 1."""

    def __len__(self) -> int:
        """Number of documents."""

    @property
    def starts(self) -> Any:
        """len + 1 integers: document i is tokens starts[i]:starts[i + 1]. An array, possibly memory-mapped, or anything
        that has a length and can be indexed by an integer, a slice or an array of integers."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the whole sequence, as int64 or narrower."""

    def label_mask(self, start: int, stop: int) -> np.ndarray | None:
        """bool: which of these tokens count towards the loss as labels, such as only the answers in a chat; None:
        all."""

    def label_weights(self, start: int, stop: int) -> np.ndarray | None:
        """float32: how much each of these tokens counts as a label; None: all alike."""

    def scores(self, start: int, stop: int) -> np.ndarray | None:
        """The log-probability of each of these tokens as a label, by the reference (titanmoe.data.scores); None: not
        known."""

    def kept(self, start: int, stop: int) -> np.ndarray | None:
        """A record for each of these tokens: which ids a teacher finds likeliest in its place (titanmoe.data.scores);
        None: not known."""

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where these tokens are in what `whole_of` returns."""


class TokenScores(Protocol):
    """What a model says of all tokens (titanmoe.data.scores)."""

    def read(self, start: int, stop: int) -> np.ndarray: ...


class MemoryDocuments:
    answers = 1

    def __init__(self, name: str, tokens: np.ndarray, starts: np.ndarray, label_mask: np.ndarray | None = None):
        self.name, self.tokens, self.starts, self._label_mask = name, tokens, starts, label_mask
        self.description = f"{name}, {len(starts) - 1:,} documents, {len(tokens):,} tokens"
        self.vocab_size = int(tokens.max()) + 1 if len(tokens) else 0
        digest = hashlib.blake2b(np.ascontiguousarray(tokens), digest_size=8)
        digest.update(np.ascontiguousarray(starts))
        if label_mask is not None:
            digest.update(np.ascontiguousarray(label_mask))
        self.fingerprint = f"memory:{digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]

    def label_mask(self, start: int, stop: int) -> np.ndarray | None:
        return None if self._label_mask is None else self._label_mask[start:stop]

    def label_weights(self, start: int, stop: int) -> np.ndarray | None:
        return None

    def scores(self, start: int, stop: int) -> np.ndarray | None:
        return None

    def kept(self, start: int, stop: int) -> np.ndarray | None:
        return None

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [(start, stop)]


def whole_of(documents: Any) -> Any:
    """What these are a part of: the documents as they are stored."""
    while hasattr(documents, "whole"):
        documents = documents.whole
    return documents


def is_masked(documents: Documents) -> bool:
    """Return whether only some tokens of these documents are labels, such as the answers of chats."""
    return len(documents) > 0 and documents.label_mask(0, 1) is not None


def document_of(documents: Documents, token_N: np.ndarray) -> np.ndarray:
    """The document that each token of the sequence is in; an empty document has none."""
    starts = documents.starts
    if isinstance(starts, np.ndarray):
        # Of the array's own type, or numpy would first convert all of it.
        return np.searchsorted(starts, token_N.astype(starts.dtype), side="right") - 1
    low_N, high_N = np.zeros_like(token_N), np.full_like(token_N, len(documents))
    while (high_N - low_N > 1).any():  # starts[low] <= token < starts[high]
        middle_N = (low_N + high_N) // 2
        right_N = starts[middle_N].astype(np.int64) <= token_N
        low_N, high_N = np.where(right_N, middle_N, low_N), np.where(right_N, high_N, middle_N)
    return low_N
