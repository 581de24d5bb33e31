#!/usr/bin/env python
"""Who is named among 1,024 ranks, from simulated times of arrival, and what the method itself costs.

    python scripts/simulate_stragglers.py                            # 20 trials of each fault, and a table
    python scripts/simulate_stragglers.py --out docs/reliability.md  # the table between its marks there

pp 8 x dp_shard 128 with ep 64. A step is 16 microbatches through 8 stages, forward and then backward: every rank
computes, meets the other ranks of its ep group in an all-to-all and passes the result to the next stage. At the end
comes a reduce-scatter in each stage and a sum over the world. Ranks compute in 1 ms forward and 2 ms backward, give or
take 3 %; the last stage takes a third longer. Every rank has a clock of its own, up to 1,000 s off. What the ranks
measure goes through the code of a real run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torture import write

from titanmoe.config.schema import Experts, Parallelism
from titanmoe.fold.degrees import derive
from titanmoe.fold.groups import groups
from titanmoe.watch import links
from titanmoe.watch.listener import LaneGroups
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
            LaneGroups("waited", everyone, "world"),
            LaneGroups("rows", tuple(groups(self.fold, "experts", "ep")), "ep"),
            LaneGroups("shards", tuple(groups(self.fold, "attention", "dp_shard")), "dp_shard"),
            LaneGroups("stages", tuple(groups(self.fold, "attention", "pp")), "pp"),
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

    def pairs(self, fault: Fault) -> links.Pairs:
        found: links.Pairs = {}
        for number in links.once(self.groups):
            group = self.groups[number]
            for distance in links.distances(len(group.parts[0]), group.lane):
                for part in group.parts:
                    for i, rank in enumerate(part):
                        if i < i ^ distance < len(part):
                            across = rank // NODE != part[i ^ distance] // NODE
                            found[rank, part[i ^ distance]] = PAIR_S * (1 + 3 * across) * (1 + len(found) % 7 / 14)
        if fault.link_s and (pair := (fault.rank, fault.other)) in found:
            found[pair] += 2 * fault.link_s
        return found


class Told(Stragglers):
    """The stragglers of a run whose times and links are a cluster's."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.fault, self.said = cluster, Fault(), list[dict[str, Any]]()
        trainer = SimpleNamespace(fold=cluster.fold, step=0, log_ranks=lambda *a: None, log_event=self._say)
        hosts = [list(range(first, first + NODE)) for first in range(0, cluster.fold.world, NODE)]
        names = [f"node{i}" for i in range(len(hosts))]
        super().__init__(trainer, SimpleNamespace(axes=AXES), SimpleNamespace(ranks=hosts, names=names), cluster.groups)

    def _say(self, step: int, kind: str, text: str, **more: Any) -> None:
        self.said.append(more | {"text": text})

    def _pairs(self) -> links.Pairs:
        self.messages = {"world": 1, "ep": 2 * MICROBATCHES, "dp_shard": 1, "pp": 2 * MICROBATCHES}
        return self.cluster.pairs(self.fault)

    def go(self, count: int, fault: Fault, steps: int = WINDOW) -> list[dict[str, Any]]:
        """What is said in so many windows with this fault."""
        self.fault, before = fault, len(self.said)
        for _ in range(count):
            times = np.stack([self.cluster.step(fault) for _ in range(steps)]).astype(np.float32)
            self.trainer.step += steps
            self.judge(list(range(steps)), times)
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


WHAT = {
    "compute": "a rank computes in 1.4 to 2 times as long",
    "data": "20 to 100 ms of data on one rank",
    "link": "1 to 5 ms on each message between two ranks of an ep group",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="of each fault (default 20)")
    parser.add_argument("--out", metavar="FILE", help="also write the table there, between its marks")
    args = parser.parse_args()
    right, wrong = dict.fromkeys(WHAT, 0), dict.fromkeys(WHAT, 0)
    calm = 0
    for seed in range(args.trials):
        draw = np.random.default_rng(seed)
        for kind in WHAT:
            cluster = Cluster(8, 128, 64, seed)
            told, fault = Told(cluster), faults(draw, cluster)[kind]
            calm += len(told.go(5, Fault(), steps=4))
            said = told.go(2, fault, steps=4)
            ranks = sorted({fault.rank, fault.other}) if kind == "link" else [fault.rank]
            right[kind] += [(one["ranks"], one["cause"]) for one in said] == [(ranks, kind)]
            wrong[kind] += any(one["ranks"] != ranks for one in said)
    told = Told(Cluster(8, 128, 64, 0))
    times = np.stack([told.cluster.step(Fault()) for _ in range(WINDOW)]).astype(np.float32)
    told.go(1, Fault(), 4)
    judging = [_seconds(lambda: told.judge(list(range(WINDOW)), times)) for _ in range(20)]
    table = np.full((1024, 200), 1e-4, np.float32)
    probing = [_seconds(lambda: links.slow_link(links.pairs(table, told.groups), told.host_of, {})) for _ in range(3)]
    judged, probed = (float(np.median(seconds)) for seconds in (judging, probing))
    row, probes = 4 * times.shape[2], (told.groups[number] for number in links.once(told.groups))
    rounds = sum(len(links.distances(len(group.parts[0]), group.lane)) for group in probes)
    lines = ["| what was slow | trials | named rightly | another named |", "| --- | --- | --- | --- |"]
    lines += [f"| {what} | {args.trials} | {right[kind]} | {wrong[kind]} |" for kind, what in WHAT.items()]
    lines += [
        f"| nothing, before each of these | {3 * args.trials} | | {calm} |",
        "",
        f"Each rank sends {row} bytes per step and gets {row * 1024:,}, in one message every {WINDOW} steps.",
        f"Every rank judges all in {judged * 1e3:.1f} ms per message, {judged / WINDOW * 1e6:.0f} us per step.",
        f"A probe of the links has {rounds} rounds of {links.TRIES + 1} small messages there and back;",
        f"judging it takes {probed * 1e3:.0f} ms.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        write(Path(args.out), "simulated stragglers", text)
    return 0 if not calm and all(n == args.trials for n in right.values()) else 1


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
