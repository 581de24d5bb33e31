"""Bytes that are read and written on a device to cast, copy and add up weights and gradients, besides their messages.

FSDP's are as torch 2.13 does it (_fsdp_collectives.py, _fsdp_param.py and _fsdp_param_group.py in
torch/distributed/fsdp/_fully_shard); tests/plan/test_weight_copies.py compares every formula with a rehearsal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from titanmoe.plan.sizes import WeightUnit


@dataclass(frozen=True)
class WeightCopies:
    stored: int
    """Bytes of a weight as it is kept between steps."""
    computed: int
    """As it is computed with; its gradient arises in as many."""
    reduced: int
    """Of a gradient while it is summed over ranks and microbatches."""
    each_microbatch: bool
    """Whether weights are gathered for each microbatch's forward and backward, rather than once a step."""
    pipelined: bool
    """With a pipeline gradients are summed over microbatches and reduced once a step, else for each microbatch."""
    microbatches: int
    accumulated: bool = False
    """Whether experts in no FSDP unit add their gradients up inside the products that compute them."""

    def moved(self, unit: WeightUnit, ranks: int, gathers: int = 2) -> tuple[int, int]:
        """For each microbatch, and for each step. ranks: those that share the unit. gathers: how often a microbatch
        needs its weights, if they are freed meanwhile."""
        gathered, reduced = self.gather(unit, ranks), self.reduce(unit, ranks)
        return (
            gathers * gathered * self.each_microbatch + (self.add_up(unit) if self.pipelined else reduced),
            gathered * (not self.each_microbatch) + reduced * self.pipelined,
        )

    def moved_unsharded(self, unit: WeightUnit, replicas: int) -> tuple[int, int]:
        """The same of experts that are in no FSDP unit (titanmoe.parallel.unsharded): one cast a step, and each
        microbatch's gradients are added to the sum. If products do that (titanmoe/ops/kernels/add_gradient.py), they
        read and write the sum, where they would write a gradient, which is in their own price."""
        summed = self.reduced if self.pipelined else self.stored
        summed = max(summed, self.reduced) if replicas > 1 else summed
        cast = (self.stored + self.computed) * (self.stored != self.computed)
        last = (summed + self.stored) * (summed != self.stored)
        added = 2 * summed + self.computed * (-1 if self.accumulated else 1)
        return unit.trained.whole * added, unit.trained.whole * (cast + last)

    def gather(self, unit: WeightUnit, ranks: int) -> int:
        """Once, of a unit that so many ranks share. A cast; then, alone, a copy to where it is computed with, else one
        to its place among the other ranks' and one from there, or two where a dim other than the first is cut."""
        shard, trained = unit.sharded_size(ranks), unit.trained.sharded_size(ranks)
        cast = trained * (self.stored + self.computed) * (self.stored != self.computed)
        if ranks == 1:
            return cast + 2 * self.computed * unit.whole
        return cast + 2 * self.computed * (shard + unit.whole + inner(unit))

    def add_up(self, unit: WeightUnit) -> int:
        """A microbatch's gradients, to the sum of those before it."""
        return unit.trained.whole * (self.computed + 2 * self.reduced)

    def reduce(self, unit: WeightUnit, ranks: int) -> int:
        """Once: to the message and, alone, from there; to the stored dtype; to the sum of the microbatches before."""
        trained = unit.trained
        shard, width = trained.sharded_size(ranks), self.reduced if self.pipelined else self.computed
        moved = trained.whole * (width + self.reduced) + shard * (self.reduced + self.stored) * (
            self.reduced != self.stored
        )
        moved += 3 * self.stored * shard * (self.microbatches > 1 and not self.pipelined)
        return moved + (2 * self.reduced * trained.whole if ranks == 1 else 2 * width * inner(trained))


def inner(unit: WeightUnit) -> int:
    """Elements of the tensors that are cut along a dim other than the first."""
    return sum(prod(shape) for shape, dim in zip(unit.shapes, unit.dims, strict=True) if dim)
