"""Rehearse many ranks of a world, and check that all their messages can complete (`--all-roles`, `--all-ranks`).

A small world is rehearsed on all ranks. Ranks of a stage run the same program, each in its own groups; so of a large
world the first rank of every stage is rehearsed, and of the first and last stage the last rank along each axis. The
others are taken to be like the first rank of their stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from multiprocessing import get_context

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.rank_groups import group_of
from titanmoe.rehearse.assumed_routing import AssumedRouting, IntegerMessages
from titanmoe.rehearse.message_order import Verdict, check_order
from titanmoe.rehearse.rank_program import Communicator, Program
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse
from titanmoe.this_process import usable_cores

SMALL = 8
"""The most ranks of a world whose ranks are all rehearsed."""
MIN_RANKS_PER_PROCESS = 4
"""The fewest ranks for which another process is started."""


def corners(fold: Fold) -> list[int]:
    """Return the ranks that stand for a large world, ascending.

    They are the first rank of every stage and, in the first and last stage, the last along every axis of both views.
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
    *,
    routing: float | AssumedRouting = 1.0,
    node: int = 8,
    ranks: Iterable[int] | None = None,
    steps: int = 1,
) -> Iterator[Rehearsal]:
    """Rehearse several ranks, and yield the record of the last step of each, in the order of `ranks`.

    Many ranks are rehearsed in several processes, each of which uses one CPU and takes a while to start; few in this
    one, in which torch.distributed must not be initialized.

    Args:
        config: The resolved config, from `recipe_to_rehearse`.
        hardware: The hardware whose code runs: one of `titanmoe.ops.device.HARDWARE`, such as "h100".
        routing: The assumed routing, or a number: the routed tokens of the busiest expert over the mean.
        ranks: The ranks to rehearse; None for all of a world of up to SMALL ranks, or the `corners` of a larger one.
        steps: The number of steps; the last one is recorded.
    """
    if ranks is None:
        ranks = range(world) if world <= SMALL else corners(derive(world, config.parallelism))
    ranks = list(ranks)
    rehearse_rank = partial(rehearse, config, world, name=hardware, routing=routing, node=node, steps=steps)
    processes = min(usable_cores(), len(ranks) // MIN_RANKS_PER_PROCESS)
    if processes < 2:
        yield from map(rehearse_rank, ranks)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(rehearse_rank, ranks)


def build_programs(rehearsals: list[Rehearsal]) -> list[Program]:
    """Return a Program for each rehearsal, in their order: its messages and groups, as `check_order` compares them."""
    rehearsed = {rehearsal.rank for rehearsal in rehearsals}
    return [
        Program(
            rehearsal.rank,
            rehearsal.log,
            {
                name: Communicator(
                    f"{group.kind} {group.axes}", group.ranks, tuple(r for r in group.ranks if r in rehearsed)
                )
                for name, group in rehearsal.groups.items()
            },
            rehearsal.created_groups,
        )
        for rehearsal in rehearsals
    ]


def check_ranks(rehearsals: Iterable[Rehearsal]) -> Verdict:
    """Return whether the rehearsed ranks' messages can complete and all ranks' split sizes match, with the reason.

    Split sizes are compared only if the messages can complete.

    Args:
        rehearsals: Those of all ranks, or of some: then with the first rank of each stage.
    """
    rehearsals = list(rehearsals)
    fold, programs = rehearsals[0].fold, build_programs(rehearsals)
    by_rank = {program.rank: program for program in programs}
    equal_pairs = []
    if len(by_rank) < fold.world:
        firsts = {rank: rank // fold.stage * fold.stage for rank in by_rank}
        equal_pairs = [(by_rank[first], by_rank[rank]) for rank, first in firsts.items() if rank != first]
    verdict = check_order(programs, equal_pairs)
    mismatch = next(split_mismatches(rehearsals), None) if verdict.safe else None
    return verdict if mismatch is None else Verdict(mismatch, False)


# ---- split sizes of ranks that were not rehearsed


def split_mismatches(rehearsals: list[Rehearsal]) -> Iterator[str]:
    """Yield an error message where a rank sends a number of routed tokens that the receiver does not expect.

    All ranks of a stage are checked, rehearsed or not, by running dispatchers under the assumed routing. Backward swaps
    the two sides, so forward alone is checked. If all layers have the same routing, one layer of the whole model is
    enough, in all microbatches; otherwise every layer is checked, in the first microbatch. Of groups whose ranks choose
    the same experts one is enough.
    """
    checked_kinds: set[int] = set()
    checked_groups: set[bytes] = set()
    for rehearsal in rehearsals:
        exchange = rehearsal.exchange
        if exchange is None:
            continue
        microbatches = range(1 if rehearsal.routing.by_layer else exchange.routing.microbatches)
        first = rehearsal.rank // rehearsal.fold.stage * rehearsal.fold.stage
        groups = dict.fromkeys(tuple(exchange.members("group", first + rank)) for rank in range(rehearsal.fold.stage))
        for layer in rehearsal.moe_layers:
            if (kind := exchange.routing.key(layer)) in checked_kinds:
                continue
            checked_kinds.add(kind)
            for microbatch in microbatches:
                for ranks in groups:
                    choices = sha256()
                    for rank in ranks:
                        choices.update(exchange.routing.chosen_experts(rank, microbatch, layer).numpy().tobytes())
                    if (digest := choices.digest()) not in checked_groups:
                        checked_groups.add(digest)
                        yield from _group_mismatches(exchange, ranks, microbatch, layer)


def _group_mismatches(exchange: IntegerMessages, ranks: tuple[int, ...], microbatch: int, layer: int) -> Iterator[str]:
    """Yield an error message if split sizes within one dispatcher group do not match, in one layer and microbatch.

    At most one message is yielded: of the first mismatch.

    Args:
        exchange: computes the split sizes of any rank, rehearsed or not.
        ranks: all ranks of the group, as ranks in the world.
        layer: index of the block.
    """
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
