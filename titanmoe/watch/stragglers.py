"""Which rank, or which link between two, the others wait for: measured, compared and reported.

Each rank measures its own steps (`step_times`). Every WINDOW steps, between two of them, all ranks exchange what they
measured in one message, and all come to the same conclusion; rank 0 reports it.

The norm ends forward and backward at the same moment on all ranks, so whoever waits least is the one that the others
wait for. What each rank does between its messages is compared, which needs no common clock; and only ranks of one
pipeline stage are, because stages may have unequal layers, and their bubbles are waits.

Shapes: N steps, R ranks, K columns of titanmoe.watch.step_times.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from titanmoe import observe
from titanmoe.comm.collectives import all_gather
from titanmoe.comm.host import ToHost
from titanmoe.parallel.batch_slice import to_device
from titanmoe.watch import slow_links
from titanmoe.watch.machines import Machines
from titanmoe.watch.process_groups import LaneGroups
from titanmoe.watch.slow_links import Link
from titanmoe.watch.step_times import COMPUTE, DATA, WAITS, StepTimes

if TYPE_CHECKING:
    from titanmoe.train.training import Training

WINDOW = 16
"""Steps between two comparisons."""
IN_A_ROW = 2
"""A rank is named once it has been slow in this many windows in a row, and forgotten after as many without."""
CALM = 8
"""How many of the latest windows in which nobody was late, and no link suspected, show how long ranks usually wait."""
ADVICE = {
    "compute": "look at its host (clocks, temperature, other processes) and at `imbalance`; if it stays, do without it",
    "data": "look at what it reads from, or raise data.workers or data.prefetch",
    "link": "look at cables, ports and drivers",
}
ON_ONE_HOST = {
    "compute": "look for other processes on this machine, at its clocks and temperature, and at `imbalance`",
    "data": ADVICE["data"],
    "link": "no network is between them: look for other processes on that machine, and at how its GPUs and cores are "
    "connected (nvidia-smi topo -m, lscpu)",
}
"""The advice where all slow links, or all ranks of the run, are on one machine."""


class Straggler(NamedTuple):
    """The rank, or the link, that others wait for."""

    rank: int
    other_end: int | None
    """The other end, if it is one link."""
    cause: Cause


SLOW_SHARE = 0.1
"""A rank is slow if, in at least half of the steps, it takes longer than its peers by this share of a step."""
Cause = Literal["compute", "data", "link"]
CAUSES: tuple[Cause, ...] = ("compute", "data", "link")


class Slowest(NamedTuple):
    """Seconds are medians over the steps."""

    rank: int
    excess_s: float
    """How much longer than its peers it computes and reads data."""
    data_s: float
    """How much of that is reading data."""
    step_s: float
    wait_s: float
    """What even the rank that waited least waited for: the messages themselves, and the bubble."""
    stage: int
    """The stage of the pipeline that computes longest."""
    stage_excess_s: float
    """How much longer than the mean of all."""

    @property
    def is_slow(self) -> bool:
        return self.excess_s > SLOW_SHARE * self.step_s

    @property
    def cause(self) -> Cause:
        return "data" if self.data_s > self.excess_s / 2 else "compute"


def slowest(times_NRK: np.ndarray, stage: int, usual_R: np.ndarray | None = None) -> Slowest:
    """stage: ranks of a pipeline stage. usual_R: how long each rank computed earlier, where a rank is a whole stage."""
    compute_NR, data_NR = times_NRK[:, :, COMPUTE], times_NRK[:, :, DATA]
    late_NR = data_NR - _lower_median(data_NR)
    excess_R = np.median(compute_NR - of_peers(compute_NR, stage, usual_R) + late_NR, axis=0)
    waits_R = np.median(times_NRK[:, :, WAITS:].sum(2), axis=0)
    of_stage = np.median(compute_NR, axis=0).reshape(-1, stage).mean(1)
    rank, longest = int(excess_R.argmax()), int(of_stage.argmax())
    return Slowest(
        rank,
        float(excess_R[rank]),
        float(np.median(late_NR[:, rank])),
        float(np.median(times_NRK.sum(2))),
        float(waits_R.min()),
        longest,
        float(of_stage[longest] - of_stage.mean()),
    )


def of_peers(x_NR: np.ndarray, stage: int, usual_R: np.ndarray | None = None) -> np.ndarray:
    """How long a rank of the same stage takes: the lower median, so the faster of two. A rank that is a whole
    stage is compared with its own past, scaled by how the other stages compare with theirs.
    """
    steps, ranks = x_NR.shape
    if stage > 1:
        return np.repeat(_lower_median(x_NR.reshape(steps, -1, stage)), stage, 2).reshape(steps, ranks)
    return x_NR if usual_R is None else usual_R * _lower_median(x_NR / np.maximum(usual_R, 1e-9))


def _lower_median(x: np.ndarray) -> np.ndarray:
    """Over the last axis, which is kept, with one entry."""
    middle = (x.shape[-1] - 1) // 2
    return np.partition(x, middle, -1)[..., middle : middle + 1]


class Stragglers:
    def __init__(self, training: Training, times: StepTimes, machines: Machines, groups: list[LaneGroups]):
        self.training, self.times, self.groups = training, times, groups
        self.host_of = {
            rank: name for name, ranks in zip(machines.names, machines.ranks, strict=True) for rank in ranks
        }
        self.pending: tuple[list[int], ToHost] | None = None
        """Times that are still being copied to the host. With a GPU it reads them after the next step, where it waits
        anyway."""
        self.latest: Slowest | None = None
        self.straggler: Straggler | None = None
        self.slow_windows, self.calm_windows = 0, 0
        """Windows in a row in which the same rank was slow, and in which none was."""
        self.usual: list[np.ndarray] = []
        """How long each rank computed, in the first windows."""
        self.waits: deque[float] = deque(maxlen=CALM)
        """In windows in which no link was suspected."""
        self.longer_waits = 0
        """Windows in a row in which ranks waited longer than usual though nobody was late."""
        self.link: Link | None = None
        self.messages: dict[str, int] = {}
        """Messages in a step when the links were last probed, by the names of axes; the most of any rank."""
        self.fastest: slow_links.Pairs = {}
        """The fastest probe of each pair."""

    def after_step(self) -> None:
        """All ranks call it together."""
        if self.pending is not None:
            (steps, gathered), self.pending = self.pending, None
            world = self.training.fold.world
            self.judge(steps, gathered.tensor().numpy().reshape(world, len(steps), -1).swapaxes(0, 1))
        if self.training.state.step % WINDOW == 0:
            steps, rows = self.times.take()
            if steps:
                own_times = to_device(torch.tensor(rows, dtype=torch.float32), self.training.device)
                self.pending = steps, ToHost(all_gather(own_times, 0, self.training.meshes.world))

    def judge(self, steps: list[int], times_NRK: np.ndarray) -> None:
        observe.active.rank_times(steps, self.columns(times_NRK))
        usual = np.median(self.usual, axis=0) if self.usual else None
        result, previous = slowest(times_NRK, self.training.fold.stage, usual), self.latest
        self.latest = result
        if result.is_slow:
            again = self.slow_windows > 0 and previous.rank == result.rank
            self.slow_windows, self.calm_windows = self.slow_windows + 1 if again else 1, 0
            if self.slow_windows >= IN_A_ROW:
                self._name(Straggler(result.rank, None, result.cause), result.excess_s)
            return
        self.slow_windows, self.calm_windows = 0, self.calm_windows + 1
        if len(self.usual) < IN_A_ROW:
            self.usual.append(np.median(times_NRK[:, :, COMPUTE], axis=0))
        self._suspect_links(result)
        if self.link is not None:
            self._name(Straggler(self.link.rank, self.link.other_end, "link"), self._excess(self.link))
        elif self.calm_windows >= IN_A_ROW or (self.straggler and self.straggler.cause == "link"):
            self.straggler = None

    def columns(self, times_NRK: np.ndarray) -> dict[str, np.ndarray]:
        return {name: times_NRK[:, :, k] for k, name in enumerate(("compute", "data", *self.times.axes))}

    # ---- links

    def _suspect_links(self, result: Slowest) -> None:
        """Called when nobody is late: then a longer wait comes from the messages themselves. Links are probed only if
        it stays: a first probe opens connections between ranks that may have had none.
        """
        if not self.waits or result.wait_s - median(self.waits) <= SLOW_SHARE * result.step_s:
            self.waits.append(result.wait_s)
            self.longer_waits, self.link = 0, None
            return
        self.longer_waits += 1
        if self.longer_waits == IN_A_ROW:
            self._probe(result)
            if self.link is None:  # this is how long they wait now
                self.waits.clear()

    def _probe(self, result: Slowest) -> None:
        self.link = None
        for _ in range(IN_A_ROW):  # slow only once: an interruption
            pairs = self._pair_times()
            link = slow_links.slow_link(pairs, self.host_of, self.fastest)
            for pair, seconds in pairs.items():
                self.fastest[pair] = min(seconds, self.fastest.get(pair, seconds))
            if link is None or self._excess(link) <= SLOW_SHARE * result.step_s:
                break
        else:
            self.link = link

    def _pair_times(self) -> slow_links.Pairs:
        training = self.training
        own_times = slow_links.probe(self.groups, list(training.meshes.lanes.groups.values()), training.device)
        row = to_device(torch.tensor([own_times + self.times.messages], dtype=torch.float32), training.device)
        table = ToHost(all_gather(row, 0, training.meshes.world)).tensor().numpy()
        self.messages = dict(zip(self.times.axes, table[:, len(own_times) :].max(0).tolist(), strict=True))
        return slow_links.pair_times(table, self.groups)

    def _excess(self, link: Link) -> float:
        """What it costs a step: half the round trip for each message, at most what everybody waits."""
        count = slow_links.messages_over(link, self.groups, self.messages)
        return min(count * (link.seconds - link.usual_s) / 2, self.latest.wait_s)

    # ---- reporting

    def _name(self, straggler: Straggler, excess_s: float) -> None:
        previous, self.straggler = self.straggler, straggler
        alike = previous is not None and (previous.cause == "link") == (straggler.cause == "link")
        if alike and previous[:2] == straggler[:2]:
            return
        share = excess_s / self.latest.step_s

        def name(rank: int) -> str:
            return f"rank {rank} on {self.host_of[rank]}"

        if straggler.cause == "link":
            links = f"most links of {name(straggler.rank)}"
            if straggler.other_end is not None:
                links = f"the link between {name(straggler.rank)} and {name(straggler.other_end)}"
            text = (
                f"{links}: {self.link.seconds * 1e3:.3g} ms there and back, "
                f"others {self.link.usual_s * 1e3:.3g} ms; about {excess_s:.3g} s ({share:.0%}) of a step"
            )
        else:
            doing = "reading data" if straggler.cause == "data" else "computing"
            text = (
                f"{name(straggler.rank)} takes {excess_s:.3g} s ({share:.0%}) of a step longer than its peers, {doing}"
            )
        ranks = [straggler.rank] if straggler.other_end is None else [straggler.rank, straggler.other_end]
        details = {"ranks": ranks, "cause": straggler.cause, "excess_s": round(excess_s, 6)}
        if straggler.cause == "link":
            details["links_ms"] = [[*pair, round(seconds * 1e3, 3)] for pair, seconds in self.link.pairs.items()]
        concerned = self.host_of if straggler.cause != "link" else {rank for pair in self.link.pairs for rank in pair}
        advice = ON_ONE_HOST if len({self.host_of[rank] for rank in concerned}) == 1 else ADVICE
        observe.active.event(self.training.state.step, "straggler", f"{text}: {advice[straggler.cause]}", **details)

    def report(self) -> dict[str, float]:
        """The last window's result, for the step's line."""
        result = self.latest
        if result is None:
            return {}
        values = {"rank": result.rank, "excess_s": result.excess_s, "wait_s": result.wait_s, "cause": 0}
        if self.straggler is not None:
            values |= {"rank": self.straggler.rank, "cause": 1 + CAUSES.index(self.straggler.cause)}
            if self.straggler.cause == "link" and self.link is not None:
                values |= {"excess_s": self._excess(self.link)}
            if self.straggler.other_end is not None:
                values |= {"other_rank": self.straggler.other_end}
        if self.training.fold.pp > 1:
            values |= {"stage": result.stage, "stage_excess_s": result.stage_excess_s}
        return {f"straggler.{name}": value for name, value in values.items()}
