"""A simulated cluster, for the rule that names stragglers: what the ranks measure goes through the code of a real run.

A step is 16 microbatches through the stages of a pipeline, forward and then backward: every rank computes, meets the
other ranks of its ep group in an all-to-all and passes the result to the next stage. At the end comes a reduce-scatter
in each stage and a sum over the world. Ranks compute in 1 ms forward and 2 ms backward, give or take 3 %; the last
stage takes a third longer. Every rank has a clock of its own, up to 1,000 s off.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from titanmoe.config.schema import Experts, Parallelism
from titanmoe.fold.degrees import derive
from titanmoe.fold.rank_groups import groups
from titanmoe.observe import Observer, listening
from titanmoe.watch import slow_links
from titanmoe.watch.process_groups import AxisGroups
from titanmoe.watch.step_times import COMPUTE, DATA, WAITS
from titanmoe.watch.stragglers import WINDOW, Stragglers

MICROBATCHES, FORWARD_S, NOISE, OFF_S = 16, 1e-3, 0.03, 1000.0
TRANSFER_S, PAIR_S, NODE = 1e-4, 3e-5, 8
AXES = ["world", "ep", "dp_shard", "pp"]
WORLD, EP, SHARDS, PP = range(WAITS, WAITS + 4)


class Fault(NamedTuple):
    compute: float = 1.0
    """Factor on what the rank computes in."""
    data_s: float = 0.0
    link_s: float = 0.0
    """On every message between the rank and `other`."""
    rank: int = 0
    other: int = 0


class Cluster:
    def __init__(self, pp: int, shards: int, ep: int, seed: int, longer: float = 4 / 3):
        self.fold = derive(pp * shards, Parallelism(pp=pp, experts=Experts(ep=ep)))
        self.pp, self.shards, self.ep, self.longer = pp, shards, ep, longer
        self.draw = np.random.default_rng(seed)
        everyone = (tuple(range(self.fold.world)),)
        self.groups = [
            AxisGroups("blocking", everyone, "world"),
            AxisGroups("dispatch", tuple(groups(self.fold, "experts", "ep")), "ep"),
            AxisGroups("shards", tuple(groups(self.fold, "attention", "dp_shard")), "dp_shard"),
            AxisGroups("stages", tuple(groups(self.fold, "attention", "pp")), "pp"),
        ]
        self.offset_PS = self.draw.uniform(-OFF_S, OFF_S, (pp, shards))

    def step(self, fault: Fault) -> np.ndarray:
        """(R, K): what each rank measures, by its own clock."""
        P, S, draw = self.pp, self.shards, self.draw
        place = divmod(fault.rank, S)
        factor_PS = np.ones((P, S))
        factor_PS[P - 1] *= self.longer
        factor_PS[place] *= fault.compute
        times, now_PS = np.zeros((P, S, WAITS + len(AXES))), self.offset_PS.copy()

        def spend(p: int, column: int, until_S: np.ndarray) -> None:
            until_S = np.maximum(until_S, now_PS[p])
            times[p, :, column] += until_S - now_PS[p]
            now_PS[p] = until_S

        def true(p: int) -> np.ndarray:
            return now_PS[p] - self.offset_PS[p]

        def meet(p: int, column: int, size: int) -> None:
            """All ranks of a group end together, but for the ends of a slow link."""
            last_S = np.repeat(true(p).reshape(-1, size).max(1), size) + TRANSFER_S
            if fault.link_s:
                for one in (fault.rank, fault.other):
                    if one // S == p and fault.rank // size == fault.other // size:
                        last_S[one % S] += fault.link_s
            spend(p, column, last_S + self.offset_PS[p])

        for p in range(P):
            data_S = np.full(S, 2e-4)
            data_S[place[1]] += fault.data_s * (p == place[0])
            spend(p, DATA, now_PS[p] + data_S)
        for seconds, order in ((FORWARD_S, range(P)), (2 * FORWARD_S, range(P - 1, -1, -1))):
            there_MS: np.ndarray | None = None
            for p in order:
                left_MS = np.empty((MICROBATCHES, S))
                for m in range(MICROBATCHES):
                    if there_MS is not None:
                        spend(p, PP, there_MS[m] + self.offset_PS[p])
                    noise_S = 1 + NOISE * draw.standard_normal(S).clip(-3, 3)
                    spend(p, COMPUTE, now_PS[p] + seconds * factor_PS[p] * noise_S)
                    meet(p, EP, self.ep)
                    left_MS[m] = true(p) + TRANSFER_S
                there_MS = left_MS
        for p in range(P):
            meet(p, SHARDS, S)
        last = max(true(p).max() for p in range(P)) + TRANSFER_S
        for p in range(P):
            spend(p, WORLD, last + self.offset_PS[p])
        self.offset_PS += 1e-3 * draw.standard_normal((P, S))  # clocks drift
        return times.reshape(P * S, -1)

    def pairs(self, fault: Fault) -> slow_links.PairSeconds:
        found: slow_links.PairSeconds = {}
        for number in slow_links.groups_to_probe(self.groups):
            group = self.groups[number]
            for distance in slow_links.distances(len(group.ranks[0]), group.communicator):
                for part in group.ranks:
                    for i, rank in enumerate(part):
                        if i < i ^ distance < len(part):
                            across = rank // NODE != part[i ^ distance] // NODE
                            found[rank, part[i ^ distance]] = PAIR_S * (1 + 3 * across) * (1 + len(found) % 7 / 14)
        if fault.link_s and (pair := (fault.rank, fault.other)) in found:
            found[pair] += 2 * fault.link_s
        return found


class Told(Stragglers, Observer):
    """The stragglers of a run whose times and links are a cluster's."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.fault, self.said = cluster, Fault(), list[dict[str, Any]]()
        training = SimpleNamespace(fold=cluster.fold, state=SimpleNamespace(step=0))
        hosts = [list(range(first, first + NODE)) for first in range(0, cluster.fold.world, NODE)]
        names = [f"node{i}" for i in range(len(hosts))]
        super().__init__(
            training, SimpleNamespace(axes=AXES), SimpleNamespace(ranks=hosts, names=names), cluster.groups
        )

    def event(self, step: int, kind: str, text: str, **more: Any) -> None:
        self.said.append(more | {"text": text})

    def _pair_times(self) -> slow_links.PairSeconds:
        self.messages = {"world": 1, "ep": 2 * MICROBATCHES, "dp_shard": 1, "pp": 2 * MICROBATCHES}
        return self.cluster.pairs(self.fault)

    def go(self, count: int, fault: Fault, steps: int = WINDOW) -> list[dict[str, Any]]:
        """What is said in so many windows with this fault."""
        self.fault, before = fault, len(self.said)
        for _ in range(count):
            times = np.stack([self.cluster.step(fault) for _ in range(steps)]).astype(np.float32)
            self.training.state.step += steps
            with listening(self):
                self.evaluate_window(list(range(steps)), times)
        return self.said[before:]


def faults(draw: np.random.Generator, cluster: Cluster) -> dict[str, Fault]:
    rank, world = int(draw.integers(cluster.fold.world)), cluster.fold.world
    first = rank // cluster.ep * cluster.ep
    other = first + (rank - first + int(draw.integers(1, cluster.ep))) % cluster.ep
    assert max(rank, other) < world
    low, high = sorted((rank, other))
    return {
        "compute": Fault(compute=float(draw.uniform(1.4, 2)), rank=rank),
        "data": Fault(data_s=float(draw.uniform(0.02, 0.1)), rank=rank),
        "link": Fault(link_s=float(draw.uniform(1e-3, 5e-3)), rank=low, other=high),
    }
