"""Bytes read and written on a device to cast, copy and add up weights and gradients, besides their messages.

FSDP's are as torch 2.13 does it (_fsdp_collectives.py, _fsdp_param.py and _fsdp_param_group.py in
torch/distributed/fsdp/_fully_shard); tests/plan/test_weight_copies.py compares every formula with a rehearsal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from titanmoe.plan.sizes import WeightUnit


@dataclass(frozen=True, kw_only=True)
class WeightCopies:
    """Formulas for the bytes that a training job moves on a device to cast, copy and add weights and gradients."""

    stored: int
    """Bytes of a weight as it is stored between steps."""
    computed: int
    """Bytes of a weight in the compute dtype, and of its gradient."""
    reduced: int
    """Bytes of a gradient while it is summed over ranks and microbatches."""
    each_microbatch: bool
    """Whether weights are gathered for each microbatch's forward and backward, rather than once a step."""
    pipelined: bool
    """Whether gradients are summed over microbatches and reduced once a step, rather than for each microbatch."""
    microbatches: int
    """Microbatches of a step."""
    accumulated: bool = False
    """Whether experts in no FSDP unit add their gradients up inside the products that compute them."""

    def moved(self, unit: WeightUnit, ranks: int, gathers: int = 2) -> tuple[int, int]:
        """Return the bytes that FSDP reads and writes for a unit, as (for each microbatch, for each step).

        Args:
            ranks: number of ranks that shard the unit.
            gathers: how often a microbatch gathers the weights, if they are freed meanwhile.
        """
        gathered, reduced = self.gather(unit, ranks), self.reduce(unit, ranks)
        return (
            gathers * gathered * self.each_microbatch + (self.add_up(unit) if self.pipelined else reduced),
            gathered * (not self.each_microbatch) + reduced * self.pipelined,
        )

    def moved_unsharded(self, unit: WeightUnit, replicas: int) -> tuple[int, int]:
        """Return the bytes read and written for experts outside FSDP, as (for each microbatch, for each step).

        Weights are cast once a step, and each microbatch's gradients are added to their sum. If products do that
        (titanmoe/ops/kernels/add_gradient.py), they read and write the sum, where they would write a gradient, which is
        in the products' price.

        Args:
            unit: the experts of a block.
            replicas: ranks of edp_replicate.
        """
        summed = self.reduced if self.pipelined else self.stored
        summed = max(summed, self.reduced) if replicas > 1 else summed
        cast = (self.stored + self.computed) * (self.stored != self.computed)
        last = (summed + self.stored) * (summed != self.stored)
        added = 2 * summed + self.computed * (-1 if self.accumulated else 1)
        return unit.trained.full_size * added, unit.trained.full_size * (cast + last)

    def gather(self, unit: WeightUnit, ranks: int) -> int:
        """Return the bytes that one gather of a unit reads and writes on a device, besides its message.

        They are a cast, then a copy into the message and one out of it, or two where a dim other than the first is
        sharded; on one rank a single copy.
        """
        shard, trained = unit.sharded_size(ranks), unit.trained.sharded_size(ranks)
        cast = trained * (self.stored + self.computed) * (self.stored != self.computed)
        if ranks == 1:
            return cast + 2 * self.computed * unit.full_size
        return cast + 2 * self.computed * (shard + unit.full_size + inner(unit))

    def add_up(self, unit: WeightUnit) -> int:
        """Return the bytes read and written to add one microbatch's gradients of `unit` to their running sum."""
        return unit.trained.full_size * (self.computed + 2 * self.reduced)

    def reduce(self, unit: WeightUnit, ranks: int) -> int:
        """Return the bytes that one reduction of a unit's gradients reads and writes on a device, besides its message.

        Gradients are copied into the message and, on one rank, out of it; cast to the stored dtype; and added to the
        sum of earlier microbatches.
        """
        trained = unit.trained
        shard, width = trained.sharded_size(ranks), self.reduced if self.pipelined else self.computed
        moved = trained.full_size * (width + self.reduced) + shard * (self.reduced + self.stored) * (
            self.reduced != self.stored
        )
        moved += 3 * self.stored * shard * (self.microbatches > 1 and not self.pipelined)
        return moved + (2 * self.reduced * trained.full_size if ranks == 1 else 2 * width * inner(trained))


def inner(unit: WeightUnit) -> int:
    """Return the elements, unsharded, of the unit's tensors that are sharded along a dim other than the first."""
    return sum(prod(shape) for shape, dim in zip(unit.shapes, unit.dims, strict=True) if dim)
