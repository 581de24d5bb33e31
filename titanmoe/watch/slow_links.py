"""Find a slow link: pairs of ranks that share a group time the round trip of a small message.

`titanmoe.watch.stragglers` calls it when steps wait longer though no rank is late. The lower rank of a pair measures by
its own clock. In a round every rank is in at most one pair: rank i of a group meets rank i ^ distance.

Shapes: R ranks, C columns, one for each group and round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from titanmoe.watch.process_groups import AxisGroups

BYTES = 1 << 16
"""The size of the message."""
TAG = 2
"""The tag of the messages. FSDP on CPUs uses 0 and 1."""
TRIES = 5
"""The number of timed round trips, after an untimed one. The fastest counts, because a rank may be interrupted."""
FEW = 16
"""The most ranks of a group whose pairs are all tried. Groups of dispatchers try all pairs too. In other groups a rank
tries only distances of 1, 2, 4, ...: most of their pairs never send each other anything."""
SLOW_FACTOR = 3.0
"""A pair is slow if it takes this many times as long as others."""
PairSeconds = dict[tuple[int, int], float]
"""Seconds of a round trip, by pair."""


class Link(NamedTuple):
    """A slow link between two ranks, or a rank most of whose links are slow."""

    rank: int
    other_end: int | None
    """The rank at the other end; None if most links of `rank` are slow."""
    seconds: float
    """The seconds of a round trip over the slowest pair."""
    usual_s: float
    """The seconds that a round trip over other links of the kind takes."""
    pairs: PairSeconds
    """All slow pairs."""


def distances(size: int, kind: str) -> list[int]:
    """Return the distance of each round of probes in a group: in a round, rank i of the group meets rank i ^ distance.

    All pairs meet if `kind` is "dispatch" or the group has at most `FEW` ranks; else the distances are 1, 2, 4, ...
    """
    past = 1 << (size - 1).bit_length()
    return list(range(1, past)) if size <= FEW or kind == "dispatch" else [1 << i for i in range(past.bit_length() - 1)]


def groups_to_probe(groups: Sequence[AxisGroups]) -> list[int]:
    """Return indices into `groups`, ascending, of the entries to probe: one of all that have the same groups of ranks.

    Among these an entry for dispatch is preferred, because in it all pairs of ranks are probed.
    """
    chosen: dict[tuple[tuple[int, ...], ...], int] = {}
    for number, group in enumerate(groups):
        if group.ranks not in chosen or group.communicator == "dispatch":
            chosen[group.ranks] = number
    return sorted(chosen.values())


def probe_links(
    groups: Sequence[AxisGroups], process_groups: Sequence[dist.ProcessGroup | None], device: torch.device
) -> list[float]:
    """Time a small message to other ranks and back; return this rank's seconds for each group and round, a flat list.

    Groups are in the order of `groups_to_probe`, rounds in that of `distances`. A value is 0 where this rank timed
    none: the lower rank of a pair measures. Collective over the world.

    Args:
        groups: All process groups.
        process_groups: This rank's process group for each of `groups`; None where it is in none.
        device: The device of the messages.
    """
    x, seconds = torch.zeros(BYTES, dtype=torch.uint8, device=device), []
    for number in groups_to_probe(groups):
        process_group, size = process_groups[number], len(groups[number].ranks[0])
        for distance in distances(size, groups[number].communicator):
            own_rank = -1 if process_group is None else process_group.rank()
            peer = own_rank ^ distance if own_rank >= 0 else size
            seconds.append(_round_trip(x, process_group, own_rank, peer) if peer < size else 0.0)
    return seconds


def _round_trip(x: torch.Tensor, group: dist.ProcessGroup, own_rank: int, peer: int) -> float:
    """Send x to a peer and back several times; return the least seconds, or 0 on the pair's higher rank.

    Both ranks of the pair call it, with numbers in `group`, not in the world. x is overwritten with what is received.
    """
    fastest = float("inf")
    for attempt in range(TRIES + 1):
        begin = time.perf_counter()
        if own_rank < peer:
            dist.send(x, group=group, group_dst=peer, tag=TAG)
        dist.recv(x, group=group, group_src=peer, tag=TAG)
        if own_rank > peer:
            dist.send(x, group=group, group_dst=peer, tag=TAG)
        elif x.is_cuda:
            torch.cuda.synchronize()
        if attempt:
            fastest = min(fastest, time.perf_counter() - begin)
    return fastest if own_rank < peer else 0.0


def pair_times(table_RC: np.ndarray, groups: Sequence[AxisGroups]) -> PairSeconds:
    """Return the seconds of a round trip for each pair of ranks, the least over groups, from what all ranks measured.

    `table_RC` has the result of `probe_links` on each rank in a row; further columns are ignored.
    """
    times: PairSeconds = {}
    column = 0
    for number in groups_to_probe(groups):
        group = groups[number]
        for distance in distances(len(group.ranks[0]), group.communicator):
            for ranks in group.ranks:
                for i, rank in enumerate(ranks):
                    if i < i ^ distance < len(ranks):
                        pair, seconds = (rank, ranks[i ^ distance]), float(table_RC[rank, column])
                        times[pair] = min(times.get(pair, seconds), seconds)
            column += 1
    return times


def find_slow_link(
    times: PairSeconds, host_of: Mapping[int, str], earlier: Mapping[tuple[int, int], float]
) -> Link | None:
    """Return the link that exceeds its usual time by most seconds; None if no pair takes `SLOW_FACTOR` times as long.

    If more than half of at least three links of one of its ranks are about as slow, that rank alone is returned. Usual
    is the median of the pairs of one kind: within a machine, or between two. With fewer than three pairs of a kind it
    is the time that the pair itself took earlier, so in the first probe such a pair is never slow.

    Args:
        times: The seconds of a round trip, by pair of ranks.
        host_of: The machine of each rank.
        earlier: The least seconds of each pair in earlier probes; {} in the first.
    """

    def kind(pair: tuple[int, int]) -> bool:
        return host_of[pair[0]] == host_of[pair[1]]

    by_kind: dict[bool, list[float]] = {}
    for pair, seconds in times.items():
        by_kind.setdefault(kind(pair), []).append(seconds)
    medians = {same: sorted(values)[(len(values) - 1) // 2] for same, values in by_kind.items() if len(values) >= 3}

    def usual(pair: tuple[int, int]) -> float:
        return medians.get(kind(pair), earlier.get(pair, times[pair]))

    slow = [pair for pair, seconds in times.items() if seconds > SLOW_FACTOR * usual(pair)]
    if not slow:
        return None
    excess = {pair: times[pair] - usual(pair) for pair in slow}
    worst = max(excess, key=excess.__getitem__)
    about_as_slow = [pair for pair in slow if excess[pair] > excess[worst] / 2]
    count, tried = (Counter(rank for pair in pairs for rank in pair) for pairs in (about_as_slow, times))
    fraction, rank = max((count[rank] / tried[rank], rank) for rank in worst)
    most_links = tried[rank] >= 3 and fraction > 0.5
    return Link(
        rank if most_links else worst[0],
        None if most_links else worst[1],
        times[worst],
        usual(worst),
        {pair: times[pair] for pair in slow},
    )


def messages_over_link(link: Link, groups: Sequence[AxisGroups], messages: Mapping[str, float]) -> float:
    """Return the number of messages of a step in all groups that contain both ends of the link, or its one rank.

    `messages` has those of a step in the groups along each set of axes, by the axes' names.
    """
    ends = {link.rank} if link.other_end is None else {link.rank, link.other_end}
    return sum(messages[axes] for axes in {group.axes for group in groups if ends <= set(group.of(link.rank))})
