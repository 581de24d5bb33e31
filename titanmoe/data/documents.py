"""The interface of a data source: tokenized documents, concatenated into one long sequence of tokens.

Packers (titanmoe.data.pack) read sources through it. A document's tokens include its EOS token, and a BOS token if the
tokenizer has one. Tokens may lie in memory or in shards on disk: callers read a few thousand of them at a time.

Shapes: N token positions in the concatenated sequence.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # it imports this module
    from titanmoe.data.token_scores import StoredScores


class Documents:
    """Base class of a source of tokenized documents. Ranges [start, stop) count tokens of the concatenated sequence."""

    name: str
    """Name of the source in logs and metrics."""
    fingerprint: str
    """Digest of the contents; a resumed run compares it."""
    description: str
    """One line for people: where the documents come from, and how many documents and tokens there are."""
    completions_per_prompt = 1
    """2 for preference data: documents 2 i and 2 i + 1 are a prompt with its chosen and its rejected completion. Else
    1."""
    starts: Any
    """Index of the first token of each document, with the total number of tokens at the end: len + 1 integers.

    Document i is tokens [starts[i], starts[i + 1]). An array, possibly memory-mapped, or anything that has a length and
    can be indexed by an integer, a slice or an array of integers."""
    stored_reference_log_probs: StoredScores | None = None
    """Log-probabilities under the reference model; set once it is known which model that is."""
    stored_teacher_log_probs: StoredScores | None = None
    """Top-k scores of the teacher; set if the recipe distils from stored scores."""

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.starts) - 1

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of tokens [start, stop), as int64 or narrower."""

    def label_mask(self, start: int, stop: int) -> np.ndarray | None:
        """Return whether each of tokens [start, stop) counts in the loss as a label (bool); None if all do, as here."""
        return None

    def label_weights(self, start: int, stop: int) -> np.ndarray | None:
        """Return the weight as a label of each of tokens [start, stop) (float32); None if none are stored, as here."""
        return None

    def reference_log_probs(self, start: int, stop: int) -> np.ndarray | None:
        """Return the reference model's log-probability of each token of [start, stop), given the tokens before it.

        It is 0 for tokens that are no labels, and NaN for those that were not scored. None if the run reads no scores.
        """
        return self.stored_reference_log_probs.read(start, stop) if self.stored_reference_log_probs else None

    def teacher_log_probs(self, start: int, stop: int) -> np.ndarray | None:
        """Return for each of tokens [start, stop) a teacher's top-k ids and log-probabilities, given the tokens before.

        Record i - start is the prediction of token i. Its dtype is that of `titanmoe.data.token_scores.TopK.record`.
        Log-probabilities are NaN for tokens that were not scored. None if the run reads no teacher.
        """
        return self.stored_teacher_log_probs.read(start, stop) if self.stored_teacher_log_probs else None

    def stored_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return where tokens [start, stop) are stored, as ranges of tokens of `stored_documents(self)`, in order.

        Here it is the range itself; a subset of documents has others, and several.
        """
        return [(start, stop)]


class MemoryDocuments(Documents):
    """Documents whose tokens are in memory."""

    def __init__(self, name: str, tokens: np.ndarray, starts: np.ndarray, label_mask: np.ndarray | None = None):
        self.name, self.tokens, self.starts, self._label_mask = name, tokens, starts, label_mask
        self.description = f"{name}, {len(starts) - 1:,} documents, {len(tokens):,} tokens"
        digest = hashlib.blake2b(np.ascontiguousarray(tokens), digest_size=8)
        digest.update(np.ascontiguousarray(starts))
        if label_mask is not None:
            digest.update(np.ascontiguousarray(label_mask))
        self.fingerprint = f"memory:{digest.hexdigest()}"

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]

    def label_mask(self, start: int, stop: int) -> np.ndarray | None:
        return None if self._label_mask is None else self._label_mask[start:stop]


def split_by_shard(first: np.ndarray, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (shard, begin, end) for each shard that a range of items touches; begin and end count within the shard.

    Args:
        first: number of the first item of each shard, or range of documents, and the total.
        begin: first item of the range, counted over all shards.
        end: one past the last item.
    """
    shard = int(np.searchsorted(first, begin, side="right")) - 1
    while begin < end:
        stop = min(end, int(first[shard + 1]))
        if begin < stop:
            yield shard, begin - int(first[shard]), stop - int(first[shard])
        begin, shard = max(begin, stop), shard + 1


def stored_documents(documents: Documents) -> Any:
    """Return the source of a subset (titanmoe.data.held_out), also of a subset of one; any other source as it is."""
    while hasattr(documents, "parent"):
        documents = documents.parent
    return documents


def is_masked(documents: Documents) -> bool:
    """Return whether documents have a label mask, as chats and pairs do, whatever is in it; False without documents."""
    return len(documents) > 0 and documents.label_mask(0, 1) is not None


def find_documents(documents: Documents, token_N: np.ndarray) -> np.ndarray:
    """Return the number, from 0, of the document that contains each token: (N,).

    Tokens are given by their index in the concatenation of all documents.
    """
    starts = documents.starts
    if isinstance(starts, np.ndarray):
        # Of the array's dtype: numpy would otherwise convert the whole array first.
        return np.searchsorted(starts, token_N.astype(starts.dtype), side="right") - 1
    low_N, high_N = np.zeros_like(token_N), np.full_like(token_N, len(documents))
    while (high_N - low_N > 1).any():  # starts[low] <= token < starts[high]
        middle_N = (low_N + high_N) // 2
        right_N = starts[middle_N].astype(np.int64) <= token_N
        low_N, high_N = np.where(right_N, middle_N, low_N), np.where(right_N, high_N, middle_N)
    return low_N
