"""Pairs of answers to sequences: both answers of a pair, each after the prompt as a document of its own, lie in one.

Where a pair does not fit, the longer answers are cut at their ends. It is left out if that leaves nothing of an answer,
as where the prompt is too long, or nothing in which the two differ.

Shapes: P prompts, 2 their answers.
"""

from __future__ import annotations

import numpy as np

from titanmoe.data.batch import ANSWER, PAIRS
from titanmoe.data.documents import Documents
from titanmoe.data.pack import BUFFER, Arrays, BestFit, PackedBuffer, Pieces, best_fit
from titanmoe.data.shuffle import permute
from titanmoe.ops.counter_rng import key


class AnswerFit(BestFit):
    """Best fit of pairs, BUFFER of them at a time."""

    def __init__(self, documents: Documents, seq_len: int, seed: int):
        super().__init__(documents, seq_len, seed)
        start = np.asarray(documents.starts[:]).astype(np.int64)
        self.start_P2, self.length_P2 = start[:-1].reshape(-1, 2), np.diff(start).reshape(-1, 2) - 1
        self.prompts = len(self.start_P2)
        self.buffers = -(-self.prompts // BUFFER)
        long_P = self.length_P2.sum(1) > seq_len
        for prompt in np.flatnonzero(long_P).tolist():
            self._cut(prompt)
        self.num_left_out, self.num_cut = int((self.length_P2.sum(1) == 0).sum()), int(long_P.sum())
        self.num_cut -= self.num_left_out
        self.pairs = int(self.length_P2.sum())

    @property
    def note(self) -> str:
        """What was done to those that are too long."""
        parts = [f"{self.num_left_out:,} left out, whose prompt leaves no room for an answer"] * (self.num_left_out > 0)
        parts += [f"{self.num_cut:,} with an answer cut"] * (self.num_cut > 0)
        return (
            f"{self.documents.name}: of {self.prompts:,}, {', '.join(parts)} (seq_len {self.seq_len})" if parts else ""
        )

    def _cut(self, prompt: int) -> None:
        start_2, length_2, half = self.start_P2[prompt], self.length_P2[prompt], self.seq_len // 2
        shorter = int(length_2.argmin())
        length_2[shorter] = min(length_2[shorter], half)
        length_2[1 - shorter] = self.seq_len - length_2[shorter]
        ends = [(start, start + length + 1) for start, length in zip(start_2.tolist(), length_2.tolist(), strict=True)]
        answered = all(self.documents.label_mask(*both)[1:].any() for both in ends)
        if not answered or np.array_equal(*(self.documents.read(*both) for both in ends)):
            length_2[:] = 0

    def _pack(self) -> PackedBuffer:
        number = np.arange(self.buffer * BUFFER, min((self.buffer + 1) * BUFFER, self.prompts))
        prompt = permute(key("documents", self.seed, self.epoch), number, self.prompts)
        size = self.length_P2[prompt].sum(1)
        prompt = prompt[np.argsort(-size, kind="stable")][: int((size > 0).sum())]
        bins = best_fit(self.length_P2[prompt].sum(1).tolist(), self.seq_len)
        pieces = [Pieces(self.start_P2[prompt[bin]].ravel(), self.length_P2[prompt[bin]].ravel()) for bin in bins]
        order = key("sequences", self.seed, self.epoch, self.buffer)
        none = np.empty(0, np.int64)
        return PackedBuffer(none, none, pieces, permute(order, np.arange(len(pieces)), len(pieces)))

    def fill(self, pieces: Pieces, out: Arrays, n: int) -> None:
        super().fill(pieces, out, n)
        answers = len(pieces.pairs_P)
        out.further[ANSWER][n, : pieces.pairs_P.sum()] = np.repeat(np.arange(answers), pieces.pairs_P)
        out.further[PAIRS][n] = answers // 2
