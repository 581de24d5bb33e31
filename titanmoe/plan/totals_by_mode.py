"""Seconds of all blocks of a model, added up, for each mode of recomputation: what the search puts together."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.plan.block_costs import BlockCosts, Cost
from titanmoe.plan.rows_on_their_way import CHUNKS, NEAR, RowsWay, fewest

MODES = ("none", "selective", "moe", "full_but_rows", "full")
SecondsByMode = tuple[float, ...]
"""In the order of MODES."""


def _add_half(
    totals: list[float], count: int, forward: Cost, backward: Cost, again: dict[str, Cost] | None = None
) -> list[float]:
    """The totals with this half of `count` blocks added. again: what each mode computes twice of it; full recomputation
    all, if nothing is said."""
    once = sum(forward) + sum(backward)
    again = again or {"full": forward, "full_but_rows": forward}
    recompute = {mode: sum(cost) for mode, cost in again.items()} | {"selective": forward.memory / 2}
    return [x + count * (once + recompute.get(mode, 0.0)) for x, mode in zip(totals, MODES, strict=True)]


def non_expert_seconds(costs: BlockCosts, tp: int, cp: int, samples: int) -> SecondsByMode:
    """Of everything that the experts' mapping does not touch."""
    totals = [sum(costs.head(tp, cp, samples))] * len(MODES)
    for (experts, like), count in costs.kinds.items():
        totals = _add_half(totals, count, *costs.attention(tp, cp, samples, like))
        if not experts:
            dense = costs.dense(tp, cp, samples, costs.model.dense_hidden, costs.backward[like].ffn)
            totals = _add_half(totals, count, *dense)
    return tuple(totals)


def expert_seconds(
    costs: BlockCosts, share: int, samples: int, tp: int, ep: int, etp: int, way: RowsWay
) -> SecondsByMode:
    """Of all experts. share: ranks that share a sample, tp x cp."""
    counts: Counter[float] = Counter()
    for (experts, like), count in costs.kinds.items():
        counts[costs.backward[like].ffn] += count * experts
    totals, degrees = [0.0] * len(MODES), (share, samples, tp, ep, etp)
    for factor, count in counts.items():
        if count:
            forward, backward = costs.experts(*degrees, way, factor)
            again = {mode: costs.experts_again(forward, mode, *degrees, way) for mode in ("moe", *MODES[3:])}
            totals = _add_half(totals, count, forward, backward, again)
    return tuple(totals)


def best_ways(costs: BlockCosts, dispatcher: str, *experts: int) -> list[tuple[RowsWay, float]]:
    """By mode of recomputation: with as few chunks as pay, and the seconds of all experts. experts: the arguments of
    `expert_seconds` before the last."""
    seconds = {1: expert_seconds(costs, *experts, RowsWay(dispatcher))}
    travel = row_seconds(costs, *experts, RowsWay(dispatcher))
    if not DISPATCHERS.look_up(dispatcher).whole and travel > (1 - 1 / NEAR) * seconds[1][0]:
        for before, n in pairwise(CHUNKS):
            seconds[n] = expert_seconds(costs, *experts, RowsWay(dispatcher, n))
            if seconds[n][0] > seconds[before][0]:
                break
    best = [fewest({n: by_mode[i] for n, by_mode in seconds.items()}) for i in range(len(MODES))]
    return [(RowsWay(dispatcher, n), seconds[n][i]) for i, n in enumerate(best)]


def row_seconds(costs: BlockCosts, *experts: Any) -> float:
    """Of `expert_seconds`, those of the rows' messages, if nothing is recomputed."""
    halves = costs.experts(*experts)
    return sum(count * has for (has, _), count in costs.kinds.items()) * sum(half.rows for half in halves)
