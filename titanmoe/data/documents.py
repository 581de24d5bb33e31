"""What training reads, whatever the source: documents, one after the other in one long row of tokens.

A document's tokens include its end mark, and its begin mark where the tokenizer has one. Where the tokens lie, in
memory or in shards on a disk, is the source's affair: nobody asks for more than a few thousand of them at a time.

Shapes: N positions asked for.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np


class Documents(Protocol):
    name: str
    """As told in logs and metrics."""
    fingerprint: str
    """Of the content; a resumed run compares it."""
    vocab_size: int
    """One above the largest token id that may occur."""

    def __len__(self) -> int:
        """Number of documents."""

    @property
    def starts(self) -> Any:
        """len + 1 integers: document i is tokens starts[i]:starts[i + 1]. An array, perhaps memory-mapped, or what has
        a length and takes an integer, a slice or an array of integers like one."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the whole row, as int64 or narrower."""

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        """bool: which of these tokens carry loss as labels, as in a chat the answers alone; None: all."""


class MemoryDocuments:
    def __init__(self, name: str, tokens: np.ndarray, starts: np.ndarray, counted: np.ndarray | None = None):
        self.name, self.tokens, self.starts, self.labels = name, tokens, starts, counted
        self.vocab_size = int(tokens.max()) + 1 if len(tokens) else 0
        digest = hashlib.blake2b(np.ascontiguousarray(tokens), digest_size=8)
        digest.update(np.ascontiguousarray(starts))
        if counted is not None:
            digest.update(np.ascontiguousarray(counted))
        self.fingerprint = f"memory:{digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        return None if self.labels is None else self.labels[start:stop]


def document_of(documents: Documents, token_N: np.ndarray) -> np.ndarray:
    """The document that each token of the row lies in; an empty one holds none."""
    starts = documents.starts
    if isinstance(starts, np.ndarray):
        # Of one type with the array, or numpy would first convert the whole of it.
        return np.searchsorted(starts, token_N.astype(starts.dtype), side="right") - 1
    low_N, high_N = np.zeros_like(token_N), np.full_like(token_N, len(documents))
    while (high_N - low_N > 1).any():  # starts[low] <= token < starts[high]
        middle_N = (low_N + high_N) // 2
        right_N = starts[middle_N].astype(np.int64) <= token_N
        low_N, high_N = np.where(right_N, middle_N, low_N), np.where(right_N, high_N, middle_N)
    return low_N
