"""Best-fit packing of chats, none of which is split: an assistant's message is never without the turns before it.

A chat of more than seq_len positions is refused, left out, or truncated after the last assistant message that fits, as
data.long_chats says. A truncated chat keeps its system prompt and first turns. A chat of which not even the first
assistant message fits is left out. Lengths are read when the run starts; label masks only of the long chats.

Shapes: D documents that are looked up, L long chats.
"""

from __future__ import annotations

import numpy as np

from titanmoe.data.documents import Documents
from titanmoe.data.lengths import describe_needed
from titanmoe.data.pack import BestFitPacker

SCANNED = 1 << 20
"""Number of documents whose lengths are read at a time."""


class ChatPacker(BestFitPacker):
    """Packer that puts chats into few sequences by best fit, and never splits a chat.

    `long_chats` says what happens to chats longer than seq_len: "refuse" (see `refusal`), "drop" or "cut".
    """

    note_row = "long chats"

    def __init__(self, documents: Documents, seq_len: int, seed: int, long_chats: str):
        super().__init__(documents, seq_len, seed)
        self.long_chats = long_chats
        self.long_L, self.length_L = _longer_than(documents, seq_len)
        self.keep_L = np.zeros_like(self.length_L)
        """Positions that remain of each long chat; 0 if it is left out."""
        if long_chats == "cut":
            self.keep_L = np.array([self._truncated_length(number) for number in self.long_L.tolist()], np.int64)
        self.num_lost_positions = int((self.length_L - self.keep_L).sum())
        """Positions of the source that are never trained on."""
        self.all_pairs = self.pairs
        self.pairs -= self.num_lost_positions
        if len(self.long_L):
            self.name = f'best_fit, long_chats = "{long_chats}"'

    @property
    def note(self) -> str:
        """Line for the log's header about chats longer than seq_len; "" if there are none."""
        if not (long := len(self.long_L)):
            return ""
        out, lost = int((self.keep_L == 0).sum()), self.num_lost_positions / self.all_pairs
        changes = [f"{out:,} left out"] * (out > 0) + [f"{long - out:,} truncated after an assistant message"] * (
            long > out
        )
        return (
            f"{self.documents.name}: {long:,} of {len(self.documents):,} chats are longer than seq_len = "
            f"{self.seq_len:,}: {', '.join(changes)} (data.long_chats), {lost:.1%} of all tokens are lost; "
            f"{describe_needed(self.length_L, len(self.documents))}"
        )

    def describe_long(self, count: int) -> str:
        keep_L = self.keep_L[self.long_L < count]
        out = int((keep_L == 0).sum())
        return (
            f"{out:,} left out, {len(keep_L) - out:,} truncated after an assistant message "
            f'(data.long_chats = "{self.long_chats}")'
        )

    def refusal(self) -> str:
        """Return the error message if "refuse" meets a long chat, or no chat would be left at all; else ""."""
        long, total = len(self.long_L), len(self.documents)
        if long and self.long_chats == "refuse":
            return (
                f"{long:,} of {total:,} chats are longer than training.seq_len = {self.seq_len:,}, and "
                f'data.long_chats = "refuse": {describe_needed(self.length_L, total)}; or set long_chats = "drop" or '
                '"cut"'
            )
        if total and not self.pairs:
            which = "not one has an assistant message that fits" if self.long_chats == "cut" else "none fits"
            return (
                f"of {total:,} chats {which} training.seq_len = {self.seq_len:,}, so there is nothing to learn: "
                f"{describe_needed(self.length_L, total)}"
                + ('; data.long_chats = "cut" would keep their first turns' if self.long_chats != "cut" else "")
            )
        return ""

    def _count_pairs(self, document_D: np.ndarray, start_D: np.ndarray) -> np.ndarray:
        pairs_D = super()._count_pairs(document_D, start_D)
        long_D = pairs_D > self.seq_len
        pairs_D[long_D] = self.keep_L[np.searchsorted(self.long_L, document_D[long_D])]
        return pairs_D

    def _truncated_length(self, number: int) -> int:
        """Return the positions to keep of a long chat, by its document's number.

        They reach to the end of its last assistant message that fits; 0 if none does.
        """
        start = int(self.documents.starts[number])
        mask = self.documents.label_mask(start, start + self.seq_len + 2)
        ends = np.flatnonzero(mask[:-1] & ~mask[1:])
        return int(ends[-1]) if len(ends) else 0


def _longer_than(documents: Documents, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the documents with more than seq_len positions, ascending, and the positions of each."""
    numbers, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for first in range(0, len(documents), SCANNED):
        starts = np.asarray(documents.starts[first : min(first + SCANNED, len(documents)) + 1]).astype(np.int64)
        length = np.diff(starts) - 1
        long = np.flatnonzero(length > seq_len)
        numbers.append(first + long)
        lengths.append(length[long])
    return np.concatenate(numbers), np.concatenate(lengths)
