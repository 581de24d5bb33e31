"""Decide which layers form each pipeline stage.

Called by titanmoe.parallel, the planner and `titanmoe fold`. Dynamic programming over layers balances the stages.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from titanmoe.config.schema import Model
from titanmoe.models.count import head_flops, layer_flops


def split_layers(
    model: Model, seq_len: int, stages: int, explicit: list[int], shares_vocabulary: bool = False
) -> list[range]:
    """Return each stage's layers, numbered from 0: as listed in the recipe, or so that the costliest stage is cheapest.

    Cost is forward FLOPs per token; the last stage also has multi-token prediction and the head, the first the
    embedding's small lookup, without head and lookup if all stages share these.

    Args:
        seq_len: length of a sequence.
        stages: number of stages, at most the number of layers.
        explicit: number of layers of each stage; empty to balance them. One stage has all layers.
        shares_vocabulary: whether parallelism.vocab is "pipeline".
    """
    if explicit and stages > 1:
        ends = list(accumulate(explicit))
        return [range(end - count, end) for end, count in zip(ends, explicit, strict=True)]
    layer, behind = layer_flops(model, seq_len)
    lookup = 0 if shares_vocabulary else 2 * model.dim
    behind -= head_flops(model) * shares_vocabulary
    total = [0, *accumulate(layer)]
    n = len(layer)

    def cost(first: int, end: int, stage: int) -> float:
        return total[end] - total[first] + (behind if stage == stages - 1 else 0) + (lookup if stage == 0 else 0)

    # best[i]: (cost of the most expensive stage, where each stage begins) if the first i layers form the stages so far
    best = {i: (cost(0, i, 0), [0]) for i in range(1, n + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(best[first][0], cost(first, end, stage)), [*best[first][1], first])
                for first in best
                if first < end
            )
            for end in range(stage + 1, n + 1)
        }
    begins = [*best[n][1], n]
    return [range(a, b) for a, b in pairwise(begins)]
