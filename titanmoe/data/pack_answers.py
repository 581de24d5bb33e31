"""Pairs of answers to sequences: both answers of a pair, each after the prompt as a document of its own, lie in one.

With data.share_prefixes what both begin with, up to the first label of either, is there once, and both go on from it
(titanmoe.mask). The last token of the prompt predicts the first one of each answer, so it is there for each.

Where a pair does not fit, the longer answers are cut at their ends. It is left out if that leaves nothing of an answer,
as where the prompt is too long, or nothing in which the two differ.

Shapes: P prompts, 2 their answers; X two, or three where prompts are shared and come first.
"""

from __future__ import annotations

import numpy as np

from titanmoe.data.batch import ANSWER, PAIRS
from titanmoe.data.documents import Documents
from titanmoe.data.pack import BUFFER, Arrays, BestFit, PackedBuffer, Pieces, best_fit
from titanmoe.data.shuffle import permute
from titanmoe.mask import branches
from titanmoe.ops.counter_rng import key


class AnswerFit(BestFit):
    """Best fit of pairs, BUFFER of them at a time."""

    note_row = "pairs"

    def __init__(self, documents: Documents, seq_len: int, seed: int, share: bool = False):
        super().__init__(documents, seq_len, seed)
        self.share, self.name = share, "best_fit, prefixes shared" if share else "best_fit"
        start = np.asarray(documents.starts[:]).astype(np.int64)
        self.start_P2, self.length_P2 = start[:-1].reshape(-1, 2), np.diff(start).reshape(-1, 2) - 1
        self.prompts = len(self.start_P2)
        self.buffers = -(-self.prompts // BUFFER)
        self.shared_P = np.array([self._shared(n) if share else 0 for n in range(self.prompts)], np.int64)
        long_P = self.length_P2.sum(1) - self.shared_P > seq_len
        for prompt in np.flatnonzero(long_P).tolist():
            self._cut(prompt)
        self.num_left_out, self.num_cut = int((self.length_P2.sum(1) == 0).sum()), int(long_P.sum())
        self.num_cut -= self.num_left_out
        self.pairs = int(self._size(slice(None)).sum())

    @property
    def note(self) -> str:
        """What was done to those that are too long."""
        parts = [f"{self.num_left_out:,} left out, whose prompt leaves no room for an answer"] * (self.num_left_out > 0)
        parts += [f"{self.num_cut:,} with an answer cut"] * (self.num_cut > 0)
        return (
            f"{self.documents.name}: of {self.prompts:,}, {', '.join(parts)} (seq_len {self.seq_len})" if parts else ""
        )

    def _size(self, prompt: np.ndarray | slice) -> np.ndarray:
        return self.length_P2[prompt].sum(1) - self.shared_P[prompt]

    def _shared(self, prompt: int) -> int:
        """How many positions both answers begin with alike, and without a label."""
        both = [(start, start + length + 1) for start, length in zip(*self._ends(prompt), strict=True)]
        shortest = int(self.length_P2[prompt].min())
        first, second = (self.documents.read(*one)[:shortest] for one in both)
        labelled = [self.documents.label_mask(*one)[1 : shortest + 1] for one in both]
        return int(np.append((first == second) & ~labelled[0] & ~labelled[1], False).argmin())

    def _ends(self, prompt: int) -> tuple[list[int], list[int]]:
        return self.start_P2[prompt].tolist(), self.length_P2[prompt].tolist()

    def _cut(self, prompt: int) -> None:
        length_2, room = self.length_P2[prompt], self.seq_len + int(self.shared_P[prompt])
        shorter = int(length_2.argmin())
        length_2[shorter] = min(length_2[shorter], room // 2)
        length_2[1 - shorter] = room - length_2[shorter]
        ends = [(start, start + length + 1) for start, length in zip(*self._ends(prompt), strict=True)]
        answered = all(self.documents.label_mask(*both)[1:].any() for both in ends)
        if not answered or np.array_equal(*(self.documents.read(*both) for both in ends)):
            length_2[:] = self.shared_P[prompt] = 0

    def _pack(self) -> PackedBuffer:
        number = np.arange(self.buffer * BUFFER, min((self.buffer + 1) * BUFFER, self.prompts))
        prompt = permute(key("documents", self.seed, self.epoch), number, self.prompts)
        size = self._size(prompt)
        prompt = prompt[np.argsort(-size, kind="stable")][: int((size > 0).sum())]
        pieces = [self._pieces(prompt[bin]) for bin in best_fit(self._size(prompt).tolist(), self.seq_len)]
        order = key("sequences", self.seed, self.epoch, self.buffer)
        none = np.empty(0, np.int64)
        return PackedBuffer(none, none, pieces, permute(order, np.arange(len(pieces)), len(pieces)))

    def _pieces(self, prompt: np.ndarray) -> Pieces:
        """Of each pair both answers; where it is shared, after the prompt."""
        start_P2, length_P2, shared_P1 = self.start_P2[prompt], self.length_P2[prompt], self.shared_P[prompt, None]
        if self.share:
            start_P2 = np.concatenate([start_P2[:, :1], start_P2 + shared_P1], 1)
            length_P2 = np.concatenate([shared_P1, length_P2 - shared_P1], 1)
        return Pieces(start_P2.ravel(), length_P2.ravel())

    def fill(self, pieces: Pieces, out: Arrays, n: int) -> None:
        super().fill(pieces, out, n)
        length_PX = pieces.pairs_P.reshape(-1, 3 if self.share else 2)
        answer_P2, own = np.arange(2 * len(length_PX)).reshape(-1, 2), slice(0, pieces.pairs_P.sum())
        answer_PX = np.concatenate([answer_P2[:, : length_PX.shape[1] - 2], answer_P2], 1)
        out.further[ANSWER][n, own] = np.repeat(answer_PX.ravel(), pieces.pairs_P)
        out.further[PAIRS][n] = len(length_PX)
        if self.share:
            out.until_NS[n, own], out.position_NS[n, own] = branches(length_PX)
