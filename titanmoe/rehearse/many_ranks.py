"""The ranks of a world to rehearse, and whether all messages can complete: all of them, or those at the corners.

Ranks of a stage run the same program, each in its own groups. Rank 0 of a large world is compared with the last rank
along each axis, and every stage has its first rank; the others are taken to be like the first of their stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from itertools import repeat
from multiprocessing import get_context

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.rank_groups import group_of
from titanmoe.rehearse.assumed_routing import AssumedRouting, IntegerMessages
from titanmoe.rehearse.message_order import Comm, Program, Verdict, check
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse

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
                name: Comm(f"{group.kind} {group.axes}", group.ranks, tuple(r for r in group.ranks if r in rehearsed))
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


# ---- split sizes of ranks that were not rehearsed


def disagreeing_splits(rehearsals: list[Rehearsal]) -> Iterator[str]:
    """Rows that one rank of a group sends and the other does not expect, under the assumed routing.

    Only forward is checked, because backward swaps the two sides. If all layers have the same routing, one layer of one
    stage is enough, because stages see the same tokens; otherwise every layer is checked, in the first microbatch. A
    dispatcher knows no more than its group, its index there and what its tokens chose, so one of all groups whose ranks
    choose alike is enough, too.
    """
    checked_kinds: set[int] = set()
    checked_groups: set[bytes] = set()
    for rehearsal in rehearsals:
        exchange = rehearsal.exchange
        if exchange is None:
            continue
        microbatches = range(1 if rehearsal.routing.by_layer else exchange.routing.microbatches)
        first = rehearsal.rank // rehearsal.fold.stage * rehearsal.fold.stage
        groups = dict.fromkeys(tuple(exchange.members("whole", first + rank)) for rank in range(rehearsal.fold.stage))
        for layer in rehearsal.moe_layers:
            if (kind := exchange.routing.key(layer)) in checked_kinds:
                continue
            checked_kinds.add(kind)
            for microbatch in microbatches:
                for ranks in groups:
                    choices = sha256()
                    for rank in ranks:
                        choices.update(exchange.routing.chosen_experts(rank, microbatch, layer).numpy().tobytes())
                    if (alike := choices.digest()) not in checked_groups:
                        checked_groups.add(alike)
                        yield from _disagreeing(exchange, ranks, microbatch, layer)


def _disagreeing(exchange: IntegerMessages, ranks: tuple[int, ...], microbatch: int, layer: int) -> Iterator[str]:
    calls = {rank: exchange.all_to_alls(rank, microbatch, layer) for rank in ranks}
    for rank, own_calls in calls.items():
        for n, (group, send, _) in enumerate(own_calls):
            members = exchange.members(group, rank)
            own_index = members.index(rank)
            for other_index, other in enumerate(members):
                other_calls = calls[other]
                expected = other_calls[n][2][own_index] if n < len(other_calls) else 0
                if send[other_index] != expected:
                    yield (
                        f"all-to-all {n} of the dispatcher in layers.{layer}, microbatch {microbatch}: rank {rank} "
                        f"sends rank {other} {send[other_index]} rows, and rank {other} expects {expected}"
                    )
                    return
