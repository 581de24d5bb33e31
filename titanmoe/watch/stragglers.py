"""Stragglers: the rank, or the link between two ranks, that the others wait for (`training.stragglers`).

Each rank measures its own steps (`titanmoe.watch.step_times`). Every WINDOW steps, between two of them, one all-gather
exchanges the times, and all ranks come to the same conclusion; rank 0 reports it.

The gradient norm ends forward and backward at the same moment on all ranks, so the rank that waits least is the one
that the others wait for. Compared are the times between messages, which need no common clock, and only of ranks of one
pipeline stage, because stages may have unequal layers and wait in their bubbles.

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
from titanmoe.comm.host_sync import HostCopy
from titanmoe.parallel.batch_slice import to_device
from titanmoe.watch import slow_links
from titanmoe.watch.machines import Machines
from titanmoe.watch.process_groups import AxisGroups
from titanmoe.watch.slow_links import Link
from titanmoe.watch.step_times import COMPUTE, DATA, WAITS, StepTimes

if TYPE_CHECKING:
    from titanmoe.train.training import Training

WINDOW = 16
"""The number of steps between two comparisons of ranks."""
IN_A_ROW = 2
"""The number of slow windows in a row after which a rank is named, and of others after which it is forgotten."""
CALM = 8
"""The number of the latest windows without a suspect that show how long ranks usually wait."""
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
    """The rank that the others wait for, or the link between two ranks."""

    rank: int
    other_end: int | None
    """The rank at the other end of a single slow link; None if a rank is slow, or most of its links are."""
    cause: Cause


SLOW_FRACTION = 0.1
"""The fraction of a step by which a slow rank takes longer than its peers, in at least half of the steps."""
Cause = Literal["compute", "data", "link"]
CAUSES: tuple[Cause, ...] = ("compute", "data", "link")


class Slowest(NamedTuple):
    """The slowest rank of a window of several steps. Seconds are medians over these steps."""

    rank: int
    excess_s: float
    """The seconds that it computes and reads data longer than its peers."""
    data_s: float
    """The seconds of `excess_s` in which it reads data."""
    step_s: float
    """The seconds of a step."""
    wait_s: float
    """The shortest wait of any rank: the messages themselves, and the pipeline's bubble."""
    stage: int
    """The pipeline stage that computes longest."""
    stage_excess_s: float
    """The seconds that this stage computes longer than the mean of all stages."""

    @property
    def is_slow(self) -> bool:
        return self.excess_s > SLOW_FRACTION * self.step_s

    @property
    def cause(self) -> Cause:
        return "data" if self.data_s > self.excess_s / 2 else "compute"


def find_slowest(times_NRK: np.ndarray, stage: int, usual_R: np.ndarray | None = None) -> Slowest:
    """Return the rank with the largest excess time: in computing over its stage plus in reading data over all ranks.

    There always is one; its `is_slow` says whether it is slow enough to matter.

    Args:
        times_NRK: The seconds of each step, rank and column.
        stage: The number of ranks in a pipeline stage.
        usual_R: The seconds that each rank computed in earlier windows; used where a stage has one rank.
    """
    compute_NR, data_NR = times_NRK[:, :, COMPUTE], times_NRK[:, :, DATA]
    late_NR = data_NR - _lower_median(data_NR)
    excess_R = np.median(compute_NR - peer_times(compute_NR, stage, usual_R) + late_NR, axis=0)
    waits_R = np.median(times_NRK[:, :, WAITS:].sum(2), axis=0)
    of_stage = np.median(compute_NR, axis=0).reshape(-1, stage).mean(1)
    rank, longest = int(excess_R.argmax()), int(of_stage.argmax())
    return Slowest(
        rank=rank,
        excess_s=float(excess_R[rank]),
        data_s=float(np.median(late_NR[:, rank])),
        step_s=float(np.median(times_NRK.sum(2))),
        wait_s=float(waits_R.min()),
        stage=longest,
        stage_excess_s=float(of_stage[longest] - of_stage.mean()),
    )


def peer_times(x_NR: np.ndarray, stage: int, usual_R: np.ndarray | None = None) -> np.ndarray:
    """Return, for each step and rank, the seconds to compare the rank's own with, of shape (steps, ranks).

    They are the lower median of the rank's pipeline stage. If stages have one rank each, they are the rank's own
    earlier seconds, scaled by how much longer or shorter the ranks now take in the median.

    Args:
        x_NR: The seconds of each step and rank.
        stage: The number of ranks in a pipeline stage.
        usual_R: The seconds that each rank took earlier; without it, a rank alone in its stage is compared with itself.
    """
    steps, ranks = x_NR.shape
    if stage > 1:
        return np.repeat(_lower_median(x_NR.reshape(steps, -1, stage)), stage, 2).reshape(steps, ranks)
    return x_NR if usual_R is None else usual_R * _lower_median(x_NR / np.maximum(usual_R, 1e-9))


def _lower_median(x: np.ndarray) -> np.ndarray:
    """Return the lower median over the last dimension, whose size becomes 1."""
    middle = (x.shape[-1] - 1) // 2
    return np.partition(x, middle, -1)[..., middle : middle + 1]


class Stragglers:
    """Comparison of all ranks' step times, which reports the rank or link that the others wait for."""

    def __init__(self, training: Training, times: StepTimes, machines: Machines, groups: list[AxisGroups]):
        self.training, self.times, self.groups = training, times, groups
        self.host_of = {
            rank: name for name, ranks in zip(machines.names, machines.ranks, strict=True) for rank in ranks
        }
        self.pending: tuple[list[int], HostCopy] | None = None
        """Steps, and their times that are being copied to the host. They are read after the next step, in which the
        host has waited for the device anyway."""
        self.latest: Slowest | None = None
        self.straggler: Straggler | None = None
        self.slow_windows, self.calm_windows = 0, 0
        """The counts of windows in a row in which the same rank was slow, and in which none was."""
        self.usual: list[np.ndarray] = []
        """The seconds that each rank computed, in the first windows."""
        self.waits: deque[float] = deque(maxlen=CALM)
        """The shortest wait of any rank in recent windows in which no link was suspected."""
        self.longer_waits = 0
        """The count of windows in a row in which ranks waited longer than usual though none was slow."""
        self.link: Link | None = None
        self.messages: dict[str, int] = {}
        """The most messages of any rank in a step when links were last probed, by axes."""
        self.fastest: slow_links.PairSeconds = {}
        """The seconds of each pair's fastest probe."""

    def after_step(self) -> None:
        """Evaluate the times that the call before exchanged, if it did; every `WINDOW` steps start the next exchange.

        Called after every step. Collective over the world.
        """
        if self.pending is not None:
            (steps, gathered), self.pending = self.pending, None
            world = self.training.fold.world
            self.evaluate_window(steps, gathered.tensor().numpy().reshape(world, len(steps), -1).swapaxes(0, 1))
        if self.training.state.step % WINDOW == 0:
            steps, rows = self.times.take()
            if steps:
                own_times = to_device(torch.tensor(rows, dtype=torch.float32), self.training.device)
                self.pending = steps, HostCopy(all_gather(own_times, 0, self.training.meshes.world))

    def evaluate_window(self, steps: list[int], times_NRK: np.ndarray) -> None:
        """Set `latest`; report the straggler that `IN_A_ROW` windows show, if it is new. Collective over the world.

        `times_NRK` are the seconds of each of these measured steps, by rank and column.
        """
        columns = {name: times_NRK[:, :, k] for k, name in enumerate(("compute", "data", *self.times.axes))}
        observe.active.rank_times(steps, columns)
        usual = np.median(self.usual, axis=0) if self.usual else None
        result, previous = find_slowest(times_NRK, self.training.fold.stage, usual), self.latest
        self.latest = result
        if result.is_slow:
            same_rank = self.slow_windows > 0 and previous.rank == result.rank
            self.slow_windows, self.calm_windows = self.slow_windows + 1 if same_rank else 1, 0
            if self.slow_windows >= IN_A_ROW:
                self._report_straggler(Straggler(result.rank, None, result.cause), result.excess_s)
            return
        self.slow_windows, self.calm_windows = 0, self.calm_windows + 1
        if len(self.usual) < IN_A_ROW:
            self.usual.append(np.median(times_NRK[:, :, COMPUTE], axis=0))
        self._suspect_links(result)
        if self.link is not None:
            self._report_straggler(Straggler(self.link.rank, self.link.other_end, "link"), self._excess(self.link))
        elif self.calm_windows >= IN_A_ROW or (self.straggler and self.straggler.cause == "link"):
            self.straggler = None

    # ---- links

    def _suspect_links(self, result: Slowest) -> None:
        """Probe the links if no rank is slow, but all have waited longer than usual in `IN_A_ROW` windows.

        Then the messages themselves are slow. If ranks waited as usual, `link` becomes None. One window is not enough,
        because a first probe opens connections between ranks that may have had none. Collective over the world.
        """
        if not self.waits or result.wait_s - median(self.waits) <= SLOW_FRACTION * result.step_s:
            self.waits.append(result.wait_s)
            self.longer_waits, self.link = 0, None
            return
        self.longer_waits += 1
        if self.longer_waits == IN_A_ROW:
            self._probe(result)
            if self.link is None:  # the longer wait is the usual one from now on
                self.waits.clear()

    def _probe(self, result: Slowest) -> None:
        """Time the links, and set `link` to one that is slow in every probe and costs enough; else to None.

        Enough is more than SLOW_FRACTION of a step, of `result.step_s` seconds. Collective over the world.
        """
        self.link = None
        for _ in range(IN_A_ROW):  # a link that is slow only once was interrupted
            pairs = self._pair_times()
            link = slow_links.find_slow_link(pairs, self.host_of, self.fastest)
            for pair, seconds in pairs.items():
                self.fastest[pair] = min(seconds, self.fastest.get(pair, seconds))
            if link is None or self._excess(link) <= SLOW_FRACTION * result.step_s:
                break
        else:
            self.link = link

    def _pair_times(self) -> slow_links.PairSeconds:
        """Time the links of ranks that share a group; return the seconds of a round trip by pair, on all ranks alike.

        Also set `messages` to the most messages of any rank in a step, by axes. Collective over the world.
        """
        training = self.training
        own_times = slow_links.probe_links(
            self.groups, list(training.meshes.communicators.groups.values()), training.device
        )
        row = to_device(torch.tensor([own_times + self.times.messages], dtype=torch.float32), training.device)
        table = HostCopy(all_gather(row, 0, training.meshes.world)).tensor().numpy()
        self.messages = dict(zip(self.times.axes, table[:, len(own_times) :].max(0).tolist(), strict=True))
        return slow_links.pair_times(table, self.groups)

    def _excess(self, link: Link) -> float:
        """Return the seconds that a slow link costs a step.

        Each message over the link costs half the excess of a round trip. The result is at most the shortest wait of any
        rank.
        """
        count = slow_links.messages_over_link(link, self.groups, self.messages)
        return min(count * (link.seconds - link.usual_s) / 2, self.latest.wait_s)

    # ---- reporting

    def _report_straggler(self, straggler: Straggler, excess_s: float) -> None:
        """Set `straggler`, and emit an event that names it, its cost and what to look at, unless it is the last one."""
        previous, self.straggler = self.straggler, straggler
        same_kind = previous is not None and (previous.cause == "link") == (straggler.cause == "link")
        if same_kind and previous[:2] == straggler[:2]:
            return
        fraction = excess_s / self.latest.step_s

        def name(rank: int) -> str:
            return f"rank {rank} on {self.host_of[rank]}"

        if straggler.cause == "link":
            links = f"most links of {name(straggler.rank)}"
            if straggler.other_end is not None:
                links = f"the link between {name(straggler.rank)} and {name(straggler.other_end)}"
            text = (
                f"{links}: {self.link.seconds * 1e3:.3g} ms for a round trip, "
                f"others {self.link.usual_s * 1e3:.3g} ms; about {excess_s:.3g} s ({fraction:.0%}) of a step"
            )
        else:
            activity = "reading data" if straggler.cause == "data" else "computing"
            cost = f"{excess_s:.3g} s ({fraction:.0%})"
            text = f"{name(straggler.rank)} takes {cost} of a step longer than its peers, {activity}"
        ranks = [straggler.rank] if straggler.other_end is None else [straggler.rank, straggler.other_end]
        details = {"ranks": ranks, "cause": straggler.cause, "excess_s": round(excess_s, 6)}
        if straggler.cause == "link":
            details["links_ms"] = [[*pair, round(seconds * 1e3, 3)] for pair, seconds in self.link.pairs.items()]
        concerned = self.host_of if straggler.cause != "link" else {rank for pair in self.link.pairs for rank in pair}
        advice = ON_ONE_HOST if len({self.host_of[rank] for rank in concerned}) == 1 else ADVICE
        observe.active.event(self.training.state.step, "straggler", f"{text}: {advice[straggler.cause]}", **details)

    def report(self) -> dict[str, float]:
        """Return the metrics of the last `WINDOW` steps, such as "straggler.rank", by name.

        {} before the first evaluation. "straggler.cause" is 0 for none, else 1 + its index in `CAUSES`. With 0,
        "straggler.rank" is the slowest rank all the same.
        """
        result = self.latest
        if result is None:
            return {}
        values = {"rank": result.rank, "excess_s": result.excess_s, "wait_s": result.wait_s, "cause": 0}
        if self.straggler is not None:
            values |= {"rank": self.straggler.rank, "cause": 1 + CAUSES.index(self.straggler.cause)}
            if self.straggler.cause == "link" and self.link is not None:
                values["excess_s"] = self._excess(self.link)
            if self.straggler.other_end is not None:
                values["other_rank"] = self.straggler.other_end
        if self.training.fold.pp > 1:
            values |= {"stage": result.stage, "stage_excess_s": result.stage_excess_s}
        return {f"straggler.{name}": value for name, value in values.items()}
