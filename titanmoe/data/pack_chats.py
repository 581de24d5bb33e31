"""Best fit of chats: none is cut where an answer would lose its question.

A chat of more than seq_len positions is refused, left out, or cut after its last answer that fits (data.long_chats). A
cut chat is the beginning of the whole one: its system prompt and first turns, each answer with all that came before it.
Where not even the first answer fits, the chat is left out. Lengths are read when the run starts, and label masks of the
long chats alone.

Shapes: D documents asked for, L long chats.
"""

from __future__ import annotations

import numpy as np

from titanmoe.data.documents import Documents
from titanmoe.data.pack import BestFit

SCANNED = 1 << 20
"""Documents whose lengths are read together."""


class ChatFit(BestFit):
    """Best fit of documents of which only some tokens are labels.

    Args:
        long_chats: data.long_chats.
    """

    note_row = "long chats"

    def __init__(self, documents: Documents, seq_len: int, seed: int, long_chats: str):
        super().__init__(documents, seq_len, seed)
        self.long_chats = long_chats
        self.long_L, self.length_L = _longer_than(documents, seq_len)
        self.kept_L = np.zeros_like(self.length_L)
        """Positions that remain of each long chat; 0 if it is left out."""
        if long_chats == "cut":
            self.kept_L = np.array([self._until_last_answer(number) for number in self.long_L.tolist()], np.int64)
        self.lost = int((self.length_L - self.kept_L).sum())
        """Positions of the source that are never trained on."""
        self.all_pairs = self.pairs
        self.pairs -= self.lost
        if len(self.long_L):
            self.name = f'best_fit, long_chats = "{long_chats}"'

    @property
    def note(self) -> str:
        """A line for the header on chats that are too long; "" if there are none."""
        if not (long := len(self.long_L)):
            return ""
        out = int((self.kept_L == 0).sum())
        parts = [f"{out:,} left out"] * (out > 0) + [f"{long - out:,} cut after an answer"] * (long > out)
        return (
            f"{self.documents.name}: {long:,} of {len(self.documents):,} chats are longer than seq_len = "
            f"{self.seq_len:,}: {', '.join(parts)} (data.long_chats), {self.lost / self.all_pairs:.1%} of all tokens "
            f"are lost; the longest needs seq_len = {int(self.length_L.max()):,}"
        )

    def refusal(self) -> str:
        """What is wrong with the chats under this data.long_chats; "" if nothing is."""
        long, total, longest = len(self.long_L), len(self.documents), int(self.length_L.max(initial=0))
        if long and self.long_chats == "refuse":
            return (
                f"{long:,} of {total:,} chats are longer than training.seq_len = {self.seq_len:,}, and "
                f'data.long_chats = "refuse": the longest needs seq_len = {longest:,}; or set long_chats = "drop" or '
                '"cut"'
            )
        if total and not self.pairs:
            which = "not one has an answer that fits" if self.long_chats == "cut" else "none fits"
            return (
                f"of {total:,} chats {which} training.seq_len = {self.seq_len:,}, so there is nothing to learn: the "
                f"longest needs seq_len = {longest:,}"
                + ('; data.long_chats = "cut" would keep their first turns' if self.long_chats != "cut" else "")
            )
        return ""

    def _pairs_of(self, document_D: np.ndarray, start_D: np.ndarray) -> np.ndarray:
        pairs_D = super()._pairs_of(document_D, start_D)
        long_D = pairs_D > self.seq_len
        pairs_D[long_D] = self.kept_L[np.searchsorted(self.long_L, document_D[long_D])]
        return pairs_D

    def _until_last_answer(self, number: int) -> int:
        """Return how many positions of a long chat come before the end of its last answer that fits; 0 if none."""
        start = int(self.documents.starts[number])
        mask = self.documents.label_mask(start, start + self.seq_len + 2)
        ends = np.flatnonzero(mask[:-1] & ~mask[1:])
        return int(ends[-1]) if len(ends) else 0


def _longer_than(documents: Documents, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of documents with more than seq_len positions, in order, and how many each has."""
    numbers, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for first in range(0, len(documents), SCANNED):
        starts = np.asarray(documents.starts[first : min(first + SCANNED, len(documents)) + 1]).astype(np.int64)
        length = np.diff(starts) - 1
        long = np.flatnonzero(length > seq_len)
        numbers.append(first + long)
        lengths.append(length[long])
    return np.concatenate(numbers), np.concatenate(lengths)
