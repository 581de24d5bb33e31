"""Split sizes of ranks that were not rehearsed, from the dispatcher's own code: what each rank sends and expects."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from titanmoe.rehearse.routing import Exchange
from titanmoe.rehearse.world import Rehearsal


def disagreeing_splits(rehearsals: list[Rehearsal]) -> Iterator[str]:
    """Rows that one rank of a group sends and the other does not expect, under the stated routing.

    Only forward is checked, because backward swaps the two sides. If all layers have the same routing, one layer of one
    stage is enough, because stages see the same tokens; otherwise every layer is checked, in the first microbatch. A
    dispatcher knows no more than its group, its index there and what its tokens chose, so one of all groups whose ranks
    choose alike is enough, too.
    """
    seen: set[int] = set()
    groups_seen: set[bytes] = set()
    for found in rehearsals:
        exchange = found.exchange
        if exchange is None:
            continue
        microbatches = range(1 if found.routing.by_layer else exchange.routing.microbatches)
        first = found.rank // found.fold.stage * found.fold.stage
        groups = dict.fromkeys(tuple(exchange.members("whole", first + rank)) for rank in range(found.fold.stage))
        for layer in found.moe_layers:
            if (kind := exchange.routing.key(layer)) in seen:
                continue
            seen.add(kind)
            for microbatch in microbatches:
                for ranks in groups:
                    choices = sha256()
                    for rank in ranks:
                        choices.update(exchange.routing.chosen(rank, microbatch, layer).numpy().tobytes())
                    if (alike := choices.digest()) not in groups_seen:
                        groups_seen.add(alike)
                        yield from _disagreeing(exchange, ranks, microbatch, layer)


def _disagreeing(exchange: Exchange, ranks: tuple[int, ...], microbatch: int, layer: int) -> Iterator[str]:
    calls = {rank: exchange.all_to_alls(rank, microbatch, layer) for rank in ranks}
    for rank, mine in calls.items():
        for n, (group, send, _) in enumerate(mine):
            members = exchange.members(group, rank)
            me = members.index(rank)
            for you, other in enumerate(members):
                theirs = calls[other]
                expected = theirs[n][2][me] if n < len(theirs) else 0
                if send[you] != expected:
                    yield (
                        f"all-to-all {n} of the dispatcher in layers.{layer}, microbatch {microbatch}: rank {rank} "
                        f"sends rank {other} {send[you]} rows, and rank {other} expects {expected}"
                    )
                    return
