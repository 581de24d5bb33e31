"""The runs of tokens that a rank has of each sample, for layers that go through tokens one after the other.

Context parallelism cuts a sequence into runs of equal length and gives each rank one of them, or an early and a late
one (zigzag). A layer takes its runs as if they were samples. What it has to know of earlier tokens comes from all
ranks:

* the last inputs of the run before, for a convolution over a few positions;
* the state in which the run before ends. A run changes a state by S -> M S + gain, whatever S is. So each rank sends M
  and gain of its runs, and computes the states between runs from those of all ranks, in the order of the sequence.

Shapes: B samples, L sequence, S positions of the attention slice, R runs of this rank in all samples, c positions of a
run, w positions before it, C channels, H heads, k and v the widths of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.collectives import NO_GROUP, Group, gather


class Runs(NamedTuple):
    """By default one rank has whole sequences."""

    own: tuple[int, ...] = (0,)
    """By number in a sequence, in the order in which the rank has them."""
    order: tuple[int, ...] = (0,)
    """The numbers of all runs, in the order that concatenating the ranks' parts gives."""
    group: Group = NO_GROUP

    def split(self, x_BS: Tensor) -> Tensor:
        return x_BS.unflatten(1, (len(self.own), -1)).flatten(0, 1)

    def join(self, x_Rc: Tensor) -> Tensor:
        return x_Rc.unflatten(0, (-1, len(self.own))).flatten(1, 2)

    def cut(self, x_BL: Tensor, before: int) -> Tensor:
        """(R, w + c): of what is known of whole sequences, this rank's runs with so many positions before each; 0
        before the first one."""
        length, padded = x_BL.shape[1] // len(self.order), F.pad(x_BL, (before, 0))
        return self._rows([padded[:, n * length : (n + 1) * length + before] for n in self.own])

    def inputs_before(self, xs: Sequence[Tensor], count: int) -> Sequence[Tensor]:
        """(R, w, C) for each (R, c, C): the last inputs before each run; 0 before the first one."""
        widths, begin = [x.shape[-1] for x in xs], max(0, xs[0].shape[1] - count)
        ends = self._all(torch.cat([x[:, begin:] for x in xs], -1))
        each, padded = ends[0].shape[1], F.pad(torch.cat(ends, 1), (0, 0, count, 0))
        return self._rows([padded[:, n * each : n * each + count] for n in self.own]).split(widths, -1)

    def states_before(self, M_RHkk: Tensor, gain_RHkv: Tensor) -> Tensor:
        """(R, H, k, v): the state in which each run begins."""
        widths = [x.shape[-1] for x in (M_RHkk, gain_RHkv)]
        parts = [both.split(widths, -1) for both in self._all(torch.cat((M_RHkk, gain_RHkv), -1))]
        # The first run begins with 0, but every rank has to take part in summing the gradients of what was gathered.
        states = [0 * parts[0][1]]
        for M, gain in parts[: max(self.own)]:
            states.append(gain + M @ states[-1])
        return self._rows([states[n] for n in self.own])

    def _all(self, x_R: Tensor) -> list[Tensor]:
        """Of each run of the sequence, from all ranks."""
        pieces = gather(x_R.unflatten(0, (-1, len(self.own))), 1, self.group).unbind(1)
        return [pieces[self.order.index(n)] for n in range(len(self.order))]

    def _rows(self, runs: list[Tensor]) -> Tensor:
        return torch.stack(runs, 1).flatten(0, 1)
