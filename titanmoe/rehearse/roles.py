"""All ranks of a world from one of each role: ranks of a stage run the same program, each in its own groups."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from multiprocessing import get_context

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.rehearse.order import Program, Verdict, check
from titanmoe.rehearse.routing import StatedRouting
from titanmoe.rehearse.splits import disagreeing_splits
from titanmoe.rehearse.world import Rehearsal, rehearse

MIN_ROLES_PER_PROCESS = 4


def role(fold: Fold, rank: int) -> int:
    """The rank that represents it: the first of its stage."""
    return rank // fold.stage * fold.stage


def roles(
    config: Config, world: int, hardware: str, routing: float | StatedRouting = 1.0, node: int = 8
) -> Iterator[Rehearsal]:
    """Rehearses each; many of them in several processes, each of which uses one CPU and takes a while to start."""
    pp = config.parallelism.pp
    arguments = [(config, world, stage * (world // pp), hardware, routing, node) for stage in range(pp)]
    processes = min(os.cpu_count() or 1, pp // MIN_ROLES_PER_PROCESS)
    if processes < 2:
        yield from starmap(rehearse, arguments)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(rehearse, *zip(*arguments, strict=True))


def programs_of_roles(rehearsals: Iterable[Rehearsal]) -> list[Program]:
    """For ranks that represent their stage. All ranks of a stage advance alike, so a group within a stage is reduced
    to the stage's first rank, and a group across stages to their first ranks.
    """
    return [
        Program(
            found.rank,
            found.log,
            {
                name: (f"{group.lane} {group.axes}", tuple(dict.fromkeys(role(found.fold, r) for r in group.ranks)))
                for name, group in found.groups.items()
            },
            exact=False,
        )
        for found in rehearsals
    ]


def programs_of_all(rehearsals: Iterable[Rehearsal]) -> list[Program]:
    """For a world of which every rank has been rehearsed: split sizes are compared too."""
    return [
        Program(
            found.rank,
            found.log,
            {name: (f"{group.lane} {group.axes}", group.ranks) for name, group in found.groups.items()},
        )
        for found in rehearsals
    ]


def check_roles(rehearsals: Iterable[Rehearsal]) -> Verdict:
    rehearsals = list(rehearsals)
    found = check(programs_of_roles(rehearsals))
    wrong = next(disagreeing_splits(rehearsals), None) if found.safe else None
    return found if wrong is None else Verdict(wrong, False)
