"""All mappings of a number of ranks, and small sets of cases that cover every pair of choices."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.legal_mappings import legal_stages

ATTENTION = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERTS = ("edp_replicate", "edp", "ep", "etp")


def factorisations(n: int, parts: int) -> list[tuple[int, ...]]:
    """Return all ordered factorisations of n into this many factors, as (2, 1, 4) of 8 into three."""
    if parts == 1:
        return [(n,)]
    return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in factorisations(n // d, parts - 1)]


@functools.cache
def all_folds(world: int) -> list[Fold]:
    """Return every mapping of the ranks, legal or not: 517 for 8 ranks."""
    return [
        Fold(world=world, **dict(zip(ATTENTION + EXPERTS, attention + experts, strict=True)))
        for attention in factorisations(world, len(ATTENTION))
        for experts in factorisations(world // attention[0], len(EXPERTS))
    ]


def legal_folds(world: int, config: Config | None = None) -> Iterator[Fold]:
    """Yield every legal mapping of a world of this many ranks, under the laws of the config if there is one."""
    for stage in legal_stages(world, config):
        for attention, experts in stage.pairs():
            yield stage.fold(attention, experts)


def degrees(fold: Fold) -> dict[str, int]:
    return {axis: getattr(fold, axis) for axis in (*ATTENTION, *EXPERTS)}


def as_changes(fold: Fold) -> dict[str, Any]:
    """Return the mapping as recipe keys, with a deeper model if there are more stages than layers."""
    changes: dict[str, Any] = {f"parallelism.{axis}": getattr(fold, axis) for axis in ATTENTION}
    changes |= {f"parallelism.experts.{axis}": getattr(fold, axis) for axis in EXPERTS}
    if fold.pp > 2:
        changes["model.num_layers"] = fold.pp
    return changes


def case_id(fold: Fold) -> str:
    """Return the id of a mapping's test case, as "tp2-ep4"."""
    return "-".join(f"{axis}{n}" for axis, n in degrees(fold).items() if n > 1) or "alone"


def cover(
    rows: Sequence[dict[str, Any]],
    seed: int = 0,
    left_out: Callable[[str, str], bool] | None = None,
    cost: Callable[[int], float] = lambda row: 1.0,
) -> list[int]:
    """Return indices of rows that together cover every pair of values that occurs in any row, chosen greedily.

    Args:
        rows: values by key.
        seed: of the order in which equally good rows are tried.
        left_out: returns whether pairs of values of two keys, given in alphabetical order, need not be covered.
        cost: returns the cost of a row, by its index.
    """
    bits: dict[Any, int] = {}  # by pair

    def pairs_of(row: dict[str, Any]) -> int:
        met = 0
        for pair in itertools.combinations(sorted((key, str(value)) for key, value in row.items()), 2):
            if (bit := bits.get(pair)) is None:
                (a, _), (b, _) = pair
                bit = bits[pair] = 0 if left_out is not None and left_out(a, b) else 1 << len(bits)
            met |= bit
        return met

    pairs = [pairs_of(row) for row in rows]
    left = functools.reduce(int.__or__, pairs, 0)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    # A row never adds more later than now, so one that would still be first with what it adds now is the best.
    worth = [(-pairs[i].bit_count() / cost(i), place, i) for place, i in enumerate(order)]
    heapq.heapify(worth)
    chosen = []
    while left:
        _, place, i = worth[0]
        now = (-(pairs[i] & left).bit_count() / cost(i), place, i)
        if now == worth[0]:
            chosen.append(i)
            left &= ~pairs[i]
            now = (0.0, place, i)
        heapq.heapreplace(worth, now)
    return chosen


def has_several_ranks(fold: Fold) -> dict[str, bool]:
    """Return for each axis whether it has several ranks: a sample of mappings covers pairs of these."""
    return {axis: n > 1 for axis, n in degrees(fold).items()}
