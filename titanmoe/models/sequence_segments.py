"""The segments of a sequence that a rank has, for layers that go through tokens in order, such as linear attention.

Context parallelism gives each rank one of equal segments, or an early and a late one (zigzag); a layer takes them as if
they were samples. Of earlier tokens it needs the last inputs, for a convolution, and the state. A segment changes a
state by S -> M S + gain: each rank sends M and gain of its segments, and computes the states between from all ranks'.

Shapes: B samples, L sequence, S positions of the attention slice, R segments of this rank in all samples, c positions
of a segment, w positions before it, C channels, H heads, k and v the widths of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.collectives import NO_GROUP, Group, all_gather_autograd


class SequenceSegments(NamedTuple):
    """The segments of each sequence that this rank has. By default one rank has full sequences."""

    local: tuple[int, ...] = (0,)
    """Numbers (0 is the first in the sequence) of this rank's segments, in the order in which the rank has them."""
    order: tuple[int, ...] = (0,)
    """Numbers of all segments, in the order that concatenating the ranks' slices of a sequence gives."""
    group: Group = NO_GROUP
    """The ranks of cp, which share each sequence."""

    def split(self, x_BS: Tensor) -> Tensor:
        """Return this rank's slices of the sequences, (B, S, ...), as segments, (R, c, ...), sample by sample."""
        return x_BS.unflatten(1, (len(self.local), -1)).flatten(0, 1)

    def join(self, x_Rc: Tensor) -> Tensor:
        """Return segments, (R, c, ...), as this rank's slices of the sequences, (B, S, ...)."""
        return x_Rc.unflatten(0, (-1, len(self.local))).flatten(1, 2)

    def of_full(self, x_BL: Tensor, before: int) -> Tensor:
        """Return this rank's segments of full sequences, each with the `before` positions in front of it.

        The result is (R, before + c). Positions in front of the sequence are 0. No communication.
        """
        length, padded = x_BL.shape[1] // len(self.order), F.pad(x_BL, (before, 0))
        return self._stack([padded[:, n * length : (n + 1) * length + before] for n in self.local])

    def inputs_before(self, xs: Sequence[Tensor], count: int) -> Sequence[Tensor]:
        """Return, for each of xs, the last inputs in front of each segment, (R, w, C). Collective over the group.

        Args:
            xs: inputs of this rank's segments, (R, c, C) each.
            count: number w of positions in front of a segment, which other ranks may have. Inputs in front of the
                sequence are 0.
        """
        widths, begin = [x.shape[-1] for x in xs], max(0, xs[0].shape[1] - count)
        ends = self._gather(torch.cat([x[:, begin:] for x in xs], -1))
        each, padded = ends[0].shape[1], F.pad(torch.cat(ends, 1), (0, 0, count, 0))
        return self._stack([padded[:, n * each : n * each + count] for n in self.local]).split(widths, -1)

    def states_before(self, M_RHkk: Tensor, gain_RHkv: Tensor) -> Tensor:
        """Return the state in which each of this rank's segments begins, (R, H, k, v). Collective over the group.

        It is 0 for the first segment of a sequence.

        Args:
            M_RHkk: factor of the change S -> M S + gain that each of this rank's segments makes to a state S; 0 if a
                document begins in the segment.
            gain_RHkv: summand of that change.
        """
        widths = [x.shape[-1] for x in (M_RHkk, gain_RHkv)]
        changes = [both.split(widths, -1) for both in self._gather(torch.cat((M_RHkk, gain_RHkv), -1))]
        # The first segment begins with 0, but every rank has to join in summing the gradients of what was gathered.
        states = [0 * changes[0][1]]
        for M, gain in changes[: max(self.local)]:
            states.append(gain + M @ states[-1])
        return self._stack([states[n] for n in self.local])

    def _gather(self, x_R: Tensor) -> list[Tensor]:
        """Return x of each segment of the sequence, (B, ...), in the sequence's order. Collective over the group.

        Differentiable. `x_R` has this rank's segments, (R, ...).
        """
        gathered = all_gather_autograd(x_R.unflatten(0, (-1, len(self.local))), 1, self.group).unbind(1)
        return [gathered[self.order.index(n)] for n in range(len(self.order))]

    def _stack(self, segments: list[Tensor]) -> Tensor:
        """Return tensors of this rank's segments, (B, ...) for each of `local`, as one, (R, ...), sample by sample."""
        return torch.stack(segments, 1).flatten(0, 1)
