"""Log-likelihoods of token sequences under a model that generates, for `titanmoe eval`.

`Scorer` shares the model with a `Generator`: one forward reads a batch of sequences, as it reads prompts, and a head
computes the log-probability of every scored token instead of the last token's logits.

Shapes: T tokens of a forward, P scored tokens, V vocabulary, D model, s owned tokens (T over tp), c scored tokens of a
chunk, B samples, S positions, K candidate ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import all_gather, all_gather_autograd, gather_objects, to_local
from titanmoe.data.quiz import ScoredSequence
from titanmoe.generate.cached_texts import CachedTexts
from titanmoe.generate.loop import Generator
from titanmoe.models.layers import promote
from titanmoe.models.vocabulary import Head

CHUNK = 1024
"""Largest number of scored tokens whose logits are in memory at a time."""


class Score(NamedTuple):
    """Score of a sequence's labels."""

    log_p: float
    """Log-probability of the labels in nats, summed over them."""
    is_greedy: bool
    """Whether each label is the most probable token at its position."""


class ScoreHead(nn.Module):
    """The output head while scoring: it returns (1, P, 2), each label's log-probability and 1 if it is greedy, else 0.

    The result is in float64, on all ranks of tp. A forward is collective over tp.
    """

    def __init__(self, head: Head, texts: CachedTexts):
        super().__init__()
        self.head, self.texts = head, texts
        self.positions: list[int] = []
        """Positions of a forward's tokens that labels follow."""
        self.labels: list[int] = []

    def forward(self, x_1sD: Tensor, labels: None, candidates_BSK: None = None) -> Tensor:
        x_PD = all_gather_autograd(x_1sD, 1, self.head.tp)[0, self.texts.to_int64(self.positions)]
        scores = [x_PD.new_zeros(0, 2, dtype=torch.float64)]
        for x_1cD, label_c in zip(
            self.head.norm(x_PD.unsqueeze(0)).split(CHUNK, 1),
            self.texts.to_int64(self.labels).split(CHUNK),
            strict=True,
        ):
            if not len(label_c):
                continue
            logits_cV = promote(all_gather(F.linear(x_1cD, to_local(self.head.weight)), 2, self.head.tp)[0])
            log_p_c1 = logits_cV.log_softmax(-1).gather(1, label_c.unsqueeze(1))
            is_greedy_c1 = (logits_cV.argmax(-1) == label_c).unsqueeze(1)
            scores.append(torch.cat((log_p_c1.double(), is_greedy_c1.double()), 1))
        return torch.cat(scores).unsqueeze(0)


class Scorer:
    """Scorer of token sequences by the model of a generator, which can generate between calls of `score`.

    `length` is the most tokens that the model reads of a sequence; earlier ones are left out.
    """

    def __init__(self, generator: Generator, length: int):
        self.generator, self.length = generator, length
        self.last_head = generator.model.head
        self.head = ScoreHead(self.last_head.head, generator.cached_texts)

    @torch.no_grad()
    def score(self, sequences: Sequence[ScoredSequence], size: int) -> list[Score]:
        """Return the score of each sequence, in their order, on every rank. Collective over the world.

        Of more than `length` labels only the last `length` are scored. Removes the generator's cached texts.

        Args:
            sequences: all sequences, the same on every rank, each with a token before its labels.
            size: sequences in a forward on each data rank.
        """
        model, meshes = self.generator.model, self.generator.meshes
        self.generator.clear()
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids))
        scored: dict[int, Score] = {}
        model.head, per_forward = self.head, size * meshes.data.size
        try:
            for first in range(0, len(order), per_forward):
                local = order[first : first + per_forward][meshes.data.rank :: meshes.data.size]
                scored |= zip(local, self._forward([sequences[i] for i in local]), strict=True)
        finally:
            model.head = self.last_head
        of_ranks = gather_objects(scored, meshes.world)
        by_number = {number: score for of_rank in of_ranks for number, score in of_rank.items()}
        return [by_number[number] for number in range(len(sequences))]

    def _forward(self, sequences: list[ScoredSequence]) -> list[Score]:
        """Score a data rank's sequences, of which there may be none, in one forward. Collective over the world.

        The scores are of the labels in the last `length` positions, on every rank of the data rank. Clears what the
        generator has cached.
        """
        texts, head = self.generator.cached_texts, self.head
        truncated = [ids[-self.length - 1 :] for ids, _ in sequences]
        counts = [min(labels, len(ids) - 1) for ids, (_, labels) in zip(truncated, sequences, strict=True)]
        texts.begin_prompts([len(ids) - 1 for ids in truncated], [1] * len(truncated))
        head.positions, head.labels = [], []
        for ids, count, (_, end) in zip(truncated, counts, texts.spans, strict=True):
            head.positions += range(end - count, end)
            head.labels += ids[len(ids) - count :]
        scores_P2 = self.generator.forward([token for ids in truncated for token in ids[:-1]])[0].cpu()
        self.generator.clear()
        return [Score(float(part[:, 0].sum()), bool(part[:, 1].all())) for part in scores_P2.split(counts)]


def rolling_windows(ids: list[int], prefix: int, length: int) -> list[ScoredSequence]:
    """Return sequences that together score each token of a text once, given at most `length` tokens before it.

    The first token follows `prefix`, BOS or EOS. The model reads `length` tokens of each sequence if the text has them.
    """
    full, windows = [prefix, *ids], []
    for first in range(0, len(ids), length):
        end = min(first + length, len(ids))
        windows.append(ScoredSequence(full[max(0, end - length) : end + 1], end - first))
    return windows
