"""Which rank is slowest, given the times of all ranks in some steps.

The norm ends forward and backward at the same moment on all ranks, so whoever waits least is the one that the others
wait for. What each rank does between its messages is compared, which needs no common clock; and only ranks of one
pipeline stage are, because stages may have unequal layers, and their bubbles are waits.

Shapes: N steps, R ranks, K columns of titanmoe.watch.step_times.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from titanmoe.watch.step_times import COMPUTE, DATA, WAITS

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
