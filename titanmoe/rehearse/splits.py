"""Split sizes of ranks that were not rehearsed: the dispatcher's own code says for each what it sends and expects."""

from __future__ import annotations

from collections.abc import Iterator

from titanmoe.rehearse.routing import Exchange
from titanmoe.rehearse.world import Rehearsal


def unlike_splits(rehearsals: list[Rehearsal]) -> Iterator[str]:
    """What one rank of a group sends another and that one does not expect, under the stated routing.

    Forward alone: backward exchanges the two sides of forward's. Where every layer has the same routing, every stage
    has, as stages see the same tokens; where layers differ, each is looked at, in the first microbatch.
    """
    seen = set()
    for found in rehearsals:
        exchange = found.exchange
        if exchange is None:
            continue
        microbatches = range(1 if found.routing.by_layer else exchange.routing.microbatches)
        first = found.rank // found.fold.stage * found.fold.stage
        for layer in found.moe_layers:
            if (kind := exchange.routing.kind(layer)) not in seen:
                seen.add(kind)
                for microbatch in microbatches:
                    ranks = range(first, first + found.fold.stage)
                    yield from _unlike(exchange, ranks, microbatch, layer)


def _unlike(exchange: Exchange, ranks: range, microbatch: int, layer: int) -> Iterator[str]:
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
