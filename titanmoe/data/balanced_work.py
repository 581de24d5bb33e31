"""Assignment of a step's samples to data ranks and microbatches by their FLOPs (data.balance_work).

A microbatch takes as long as its busiest data rank, since experts are shared, and a pipeline waits for its longest
microbatch. Attention costs the square of a document's length, so one of two samples with the same number of tokens may
cost many times the other.

Shapes: N samples of a step, M microbatches, R data ranks, B samples of a microbatch on a data rank; N = M * R * B; G
documents of a sample.
"""

from __future__ import annotations

import heapq

import numpy as np

from titanmoe.config.blocks import window
from titanmoe.config.schema import Model
from titanmoe.models.count import layer_flops
from titanmoe.models.families import mixers


class DocumentWork:
    """Callable that returns the total forward FLOPs of documents as a float, given their lengths (G,) in tokens."""

    def __init__(self, model: Model):
        self.per_pair: dict[int, int] = {}
        for i, mixer in enumerate(mixers(model)):
            width = window(model, i)
            self.per_pair[width] = self.per_pair.get(width, 0) + mixer.pair_flops(model)
        layers, rest = layer_flops(model, 1)  # at sequence length 1, which counts half a pair per token
        self.per_token = sum(layers) + rest - sum(self.per_pair.values()) // 2

    def __call__(self, length_G: np.ndarray) -> float:
        n = length_G.astype(np.float64)
        total = self.per_token * n.sum()
        for width, cost in self.per_pair.items():
            visible_G = np.minimum(n, width) if width else n
            # Causal pairs of a document: a triangle over the window, then a band of its width.
            total += cost * (visible_G * (visible_G + 1) / 2 + (n - visible_G) * visible_G).sum()
        return float(total)


def assign_samples(work_N: np.ndarray, microbatches: int, ranks: int, size: int) -> np.ndarray:
    """Return the sample numbers (M, R, B) of each microbatch and data rank, chosen greedily so that work is even.

    The ranks of a microbatch have about equal work, and so have all microbatches of a rank together; microbatches of a
    step may differ. `work_N` is each sample's work in any unit, `size` is B. Nothing is communicated: ranks that pass
    the same work get the same numbers.
    """
    groups: list[list[int]] = [[] for _ in range(microbatches * ranks)]
    weight = np.zeros(len(groups))
    heap = [(0.0, g) for g in range(len(groups))]
    # The heaviest sample first, into the lightest group that has room.
    for sample in np.argsort(-work_N, kind="stable").tolist():
        load, g = heapq.heappop(heap)
        groups[g].append(sample)
        weight[g] = load + work_N[sample]
        if len(groups[g]) < size:
            heapq.heappush(heap, (float(weight[g]), g))
    out_MRB = np.empty((microbatches, ranks, size), np.int64)
    done_R = np.zeros(ranks)
    # Groups of similar work form a microbatch, whose heaviest goes to the rank with the least work so far.
    for m, similar_R in enumerate(np.argsort(-weight, kind="stable").reshape(microbatches, ranks)):
        for rank, g in zip(np.argsort(done_R, kind="stable").tolist(), similar_R.tolist(), strict=True):
            out_MRB[m, rank] = sorted(groups[g])
            done_R[rank] += weight[g]
    return out_MRB
