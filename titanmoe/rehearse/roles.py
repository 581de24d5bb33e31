"""All ranks of a world from those that differ: ranks of one stage run the same program, each in its own groups."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from multiprocessing import get_context

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.rehearse.order import Program, Verdict, check
from titanmoe.rehearse.routing import Stated
from titanmoe.rehearse.splits import unlike_splits
from titanmoe.rehearse.world import Rehearsal, rehearse

ROLES_OF_A_PROCESS = 4
"""At least."""


def role(fold: Fold, rank: int) -> int:
    """The rank that stands for it: the first of its stage."""
    return rank // fold.stage * fold.stage


def roles(
    config: Config, world: int, hardware: str, routing: float | Stated = 1.0, node: int = 8
) -> Iterator[Rehearsal]:
    """Many of them in several processes: each takes one CPU, and a while to start."""
    pp = config.parallelism.pp
    asked = [(config, world, stage * (world // pp), hardware, routing, node) for stage in range(pp)]
    processes = min(os.cpu_count() or 1, pp // ROLES_OF_A_PROCESS)
    if processes < 2:
        yield from starmap(rehearse, asked)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(rehearse, *zip(*asked, strict=True))


def programs(rehearsals: Iterable[Rehearsal]) -> list[Program]:
    """Of those that stand for others. They run the same program, so they get as far as each other: a group within a
    stage is one of the stage's first rank alone, and one across stages is of their first ranks.
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


def every_program(rehearsals: Iterable[Rehearsal]) -> list[Program]:
    """Where every rank of a world has been rehearsed: split sizes are held against each other too."""
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
    found = check(programs(rehearsals))
    unlike = next(unlike_splits(rehearsals), None) if found.safe else None
    return found if unlike is None else Verdict(unlike, False)
