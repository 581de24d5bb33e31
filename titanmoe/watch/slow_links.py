"""Which link is slow: pairs of ranks that share a group send each other a small message, there and back.

The rank with the lower number measures, by its own clock. In a round every rank is in one pair at most, and groups that
were made together take their rounds at the same time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from titanmoe.watch.process_groups import LaneGroups

BYTES = 1 << 16
TAG = 2
"""FSDP on CPUs uses 0 and 1."""
TRIES = 5
"""The fastest counts, as a rank may be interrupted. One more comes first, in which the pair meets."""
FEW = 16
"""Groups of up to this many ranks try all pairs, and so do those that rows travel in. In other groups a rank tries only
partners at distances of 1, 2, 4, ...: most of their pairs never send each other anything."""
SLOW_FACTOR = 3.0
"""A pair is slow if it takes this many times as long as others."""
Pairs = dict[tuple[int, int], float]
"""Seconds of a round trip, by pair."""


class Link(NamedTuple):
    rank: int
    other_end: int | None
    """None: most links of this rank are slow."""
    seconds: float
    """Of the round trip."""
    usual_s: float
    pairs: Pairs
    """All that are slow."""


def distances(size: int, lane: str) -> list[int]:
    """In each round, rank i meets rank i ^ distance."""
    past = 1 << (size - 1).bit_length()
    return list(range(1, past)) if size <= FEW or lane == "rows" else [1 << i for i in range(past.bit_length() - 1)]


def groups_to_probe(groups: Sequence[LaneGroups]) -> list[int]:
    """Which groups to probe: one for each set of ranks, if possible one whose pairs are all tried."""
    chosen: dict[tuple[tuple[int, ...], ...], int] = {}
    for number, group in enumerate(groups):
        if group.parts not in chosen or group.lane == "rows":
            chosen[group.parts] = number
    return sorted(chosen.values())


def probe(
    groups: Sequence[LaneGroups], process_groups: Sequence[dist.ProcessGroup | None], device: torch.device
) -> list[float]:
    """What this rank measured in each round, or 0 where it did not measure. All ranks call it together."""
    x, seconds = torch.zeros(BYTES, dtype=torch.uint8, device=device), []
    for number in groups_to_probe(groups):
        process_group, size = process_groups[number], len(groups[number].parts[0])
        for distance in distances(size, groups[number].lane):
            own_rank = -1 if process_group is None else process_group.rank()
            peer = own_rank ^ distance if own_rank >= 0 else size
            seconds.append(_there_and_back(x, process_group, own_rank, peer) if peer < size else 0.0)
    return seconds


def _there_and_back(x: torch.Tensor, group: dist.ProcessGroup, own_rank: int, peer: int) -> float:
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


def pair_times(table_RC: np.ndarray, groups: Sequence[LaneGroups]) -> Pairs:
    """The time of each pair, from what all ranks measured."""
    times: Pairs = {}
    column = 0
    for number in groups_to_probe(groups):
        group = groups[number]
        for distance in distances(len(group.parts[0]), group.lane):
            for part in group.parts:
                for i, rank in enumerate(part):
                    if i < i ^ distance < len(part):
                        pair, seconds = (rank, part[i ^ distance]), float(table_RC[rank, column])
                        times[pair] = min(times.get(pair, seconds), seconds)
            column += 1
    return times


def slow_link(times: Pairs, host_of: Mapping[int, str], before: Mapping[tuple[int, int], float]) -> Link | None:
    """The slowest pair, if others of its kind (between machines, or within one) are much faster. With fewer than three
    pairs of a kind, a pair is compared with what it took `before`.
    """

    def kind(pair: tuple[int, int]) -> bool:
        return host_of[pair[0]] == host_of[pair[1]]

    alike: dict[bool, list[float]] = {}
    for pair, seconds in times.items():
        alike.setdefault(kind(pair), []).append(seconds)
    medians = {same: sorted(values)[(len(values) - 1) // 2] for same, values in alike.items() if len(values) >= 3}

    def usual(pair: tuple[int, int]) -> float:
        return medians.get(kind(pair), before.get(pair, times[pair]))

    slow = [pair for pair, seconds in times.items() if seconds > SLOW_FACTOR * usual(pair)]
    if not slow:
        return None
    excess = {pair: times[pair] - usual(pair) for pair in slow}
    worst = max(excess, key=excess.__getitem__)
    about_as_slow = [pair for pair in slow if excess[pair] > excess[worst] / 2]
    count, tried = (Counter(rank for pair in pairs for rank in pair) for pairs in (about_as_slow, times))
    share, rank = max((count[rank] / tried[rank], rank) for rank in worst)
    most_links = tried[rank] >= 3 and share > 0.5
    return Link(
        rank if most_links else worst[0],
        None if most_links else worst[1],
        times[worst],
        usual(worst),
        {pair: times[pair] for pair in slow},
    )


def messages_over(link: Link, groups: Sequence[LaneGroups], messages: Mapping[str, float]) -> float:
    """How many messages of a step go through groups that contain the link. messages: by the names of axes."""
    ends = {link.rank} if link.other_end is None else {link.rank, link.other_end}
    return sum(messages[axes] for axes in {group.axes for group in groups if ends <= set(group.of(link.rank))})
