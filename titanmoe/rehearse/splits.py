"""Split sizes of ranks that were not rehearsed, from the dispatcher's own code: what each rank sends and expects."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from titanmoe.rehearse.routing import Exchange
from titanmoe.rehearse.world import Rehearsal


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


def _disagreeing(exchange: Exchange, ranks: tuple[int, ...], microbatch: int, layer: int) -> Iterator[str]:
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
