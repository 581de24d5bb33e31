"""Balanced work: which data rank and microbatch takes which samples of a step.

A microbatch takes as long as its busiest data rank, since experts are shared, and a pipeline waits for its longest
microbatch. Attention's share of a sample's work grows with the squares of its documents' lengths, so one of two samples
with the same number of tokens may cost many times the other.

Shapes: N samples of a step, M microbatches, R data ranks, B samples of a microbatch on a data rank; N = M * R * B.
"""

from __future__ import annotations

import heapq

import numpy as np

from titanmoe.config.blocks import window
from titanmoe.config.schema import Model
from titanmoe.models.count import layer_flops
from titanmoe.models.families import mixers


class DocumentWork:
    """Forward FLOPs of documents, with the arithmetic of titanmoe.models.count."""

    def __init__(self, model: Model):
        self.per_pair: dict[int, int] = {}
        for i, mixer in enumerate(mixers(model)):
            width = window(model, i)
            self.per_pair[width] = self.per_pair.get(width, 0) + mixer.pair_flops(model)
        layers, rest = layer_flops(model, 1)  # where a token sees half a pair
        self.per_token = sum(layers) + rest - sum(self.per_pair.values()) // 2

    def __call__(self, length_P: np.ndarray) -> float:
        n = length_P.astype(np.float64)
        total = self.per_token * n.sum()
        for width, cost in self.per_pair.items():
            visible_P = np.minimum(n, width) if width else n
            # A token sees itself and those before it, at most `seen`: a triangle, then a band.
            total += cost * (visible_P * (visible_P + 1) / 2 + (n - visible_P) * visible_P).sum()
        return float(total)


def assign(work_N: np.ndarray, microbatches: int, ranks: int, size: int) -> np.ndarray:
    """(M, R, B): the samples of each microbatch of each data rank.

    Heaviest first into the lightest of M * R groups that has room; R groups of similar weight form a microbatch; in it,
    the rank that has done least so far takes the heaviest. Ties are broken by number, so that all ranks agree.
    """
    groups: list[list[int]] = [[] for _ in range(microbatches * ranks)]
    weight = np.zeros(len(groups))
    heap = [(0.0, g) for g in range(len(groups))]
    for sample in np.argsort(-work_N, kind="stable").tolist():
        load, g = heapq.heappop(heap)
        groups[g].append(sample)
        weight[g] = load + work_N[sample]
        if len(groups[g]) < size:
            heapq.heappush(heap, (float(weight[g]), g))
    out_MRB = np.empty((microbatches, ranks, size), np.int64)
    done_R = np.zeros(ranks)
    for m, like in enumerate(np.argsort(-weight, kind="stable").reshape(microbatches, ranks)):
        for rank, g in zip(np.argsort(done_R, kind="stable").tolist(), like.tolist(), strict=True):
            out_MRB[m, rank] = sorted(groups[g])
            done_R[rank] += weight[g]
    return out_MRB
