"""The ranks of a world to rehearse, and whether all messages can complete: all of them, or those at the corners.

Ranks of a stage run the same program, each in its own groups. Rank 0 of a large world is compared with the last rank
along each axis, and every stage has its first rank; the others are taken to be like the first of their stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.groups import group_of
from titanmoe.rehearse.order import Comm, Program, Verdict, check
from titanmoe.rehearse.routing import AssumedRouting
from titanmoe.rehearse.splits import disagreeing_splits
from titanmoe.rehearse.world import Rehearsal, rehearse

SMALL = 8
"""Ranks of a world that is rehearsed whole."""
MIN_RANKS_PER_PROCESS = 4


def corners(fold: Fold) -> list[int]:
    """The first rank of every stage; and of the first and the last stage, the last rank along every axis of both
    views.
    """
    firsts = range(0, fold.world, fold.stage)
    ends = {
        group_of(fold, view, axis, first)[-1]
        for first in (firsts[0], firsts[-1])
        for view, axes in (("attention", fold.attention_axes), ("experts", fold.expert_axes))
        for axis in axes
        if axis != "pp"
    }
    return sorted(ends.union(firsts))


def rehearse_ranks(
    config: Config,
    world: int,
    hardware: str,
    routing: float | AssumedRouting = 1.0,
    node: int = 8,
    ranks: Iterable[int] | None = None,
    steps: int = 1,
) -> Iterator[Rehearsal]:
    """Yield the last of `steps` steps of each rank.

    ranks: by default all of a small world, and those at the corners of a larger one. Many of them are rehearsed in
    several processes, each of which uses one CPU and takes a while to start.
    """
    if ranks is None:
        ranks = range(world) if world <= SMALL else corners(derive(world, config.parallelism))
    ranks = list(ranks)
    arguments = repeat(config), repeat(world), ranks, repeat(hardware), repeat(routing), repeat(node), repeat(steps)
    processes = min(os.cpu_count() or 1, len(ranks) // MIN_RANKS_PER_PROCESS)
    if processes < 2:
        yield from map(rehearse, *arguments)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(rehearse, *arguments)


def programs(rehearsals: list[Rehearsal]) -> list[Program]:
    rehearsed = {rehearsal.rank for rehearsal in rehearsals}
    return [
        Program(
            rehearsal.rank,
            rehearsal.log,
            {
                name: Comm(f"{group.lane} {group.axes}", group.ranks, tuple(r for r in group.ranks if r in rehearsed))
                for name, group in rehearsal.groups.items()
            },
            rehearsal.created_groups,
        )
        for rehearsal in rehearsals
    ]


def check_ranks(rehearsals: Iterable[Rehearsal]) -> Verdict:
    rehearsals = list(rehearsals)
    fold, rank_programs = rehearsals[0].fold, programs(rehearsals)
    by_rank = {program.rank: program for program in rank_programs}
    alike_pairs = []
    if len(by_rank) < fold.world:
        firsts = {rank: rank // fold.stage * fold.stage for rank in by_rank}
        alike_pairs = [(by_rank[first], by_rank[rank]) for rank, first in firsts.items() if rank != first]
    verdict = check(rank_programs, alike_pairs)
    disagreement = next(disagreeing_splits(rehearsals), None) if verdict.safe else None
    return verdict if disagreement is None else Verdict(disagreement, False)
