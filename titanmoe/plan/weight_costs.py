"""Seconds of weights and gradients in a step: their messages, which computation may hide, and FSDP2's copies of them.

Pricer (titanmoe.plan.price) adds them to the blocks of a mapping. FSDP copies as torch 2.13 does it
(_fsdp_collectives.py, _fsdp_param.py and _fsdp_param_group.py in torch/distributed/fsdp/_fully_shard);
tests/plan/test_weight_copies.py compares every formula of copies with a rehearsal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from titanmoe.config.blocks import has_experts
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.unsharded_experts import experts_are_unsharded
from titanmoe.models.tensors import Tuning
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.cost import Cost
from titanmoe.plan.links import LinkGroup
from titanmoe.plan.sizes import Sizes, WeightUnit, fsdp


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
        added = unit.trained.full_size * (self.computed + 2 * self.reduced)  # a microbatch's gradients, to their sum
        return (
            gathers * gathered * self.each_microbatch + (added if self.pipelined else reduced),
            gathered * (not self.each_microbatch) + reduced * self.pipelined,
        )

    def moved_unsharded(self, unit: WeightUnit, replicas: int) -> tuple[int, int]:
        """Return the bytes read and written for experts outside FSDP, as (for each microbatch, for each step).

        A step casts the weights, and at its end the sum of the gradients to the stored dtype. A microbatch adds its
        gradients to the sum. If products do that (titanmoe/ops/kernels/add_gradient.py), they still read and write the
        sum but write no gradient: that write is in their own price, and subtracted here.

        Args:
            unit: the experts of a block.
            replicas: ranks of edp_replicate; above 1 the sum has at least the dtype of its reduction.
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

    def reduce(self, unit: WeightUnit, ranks: int) -> int:
        """Return the bytes that one reduction of a unit's gradients reads and writes on a device, besides its message.

        Gradients are copied into the message and, if `ranks` is 1, out of it; cast to the stored dtype; and added to
        the sum of earlier microbatches.
        """
        trained = unit.trained
        shard, width = trained.sharded_size(ranks), self.reduced if self.pipelined else self.computed
        moved = trained.full_size * (width + self.reduced)
        moved += shard * (self.reduced + self.stored) * (self.reduced != self.stored)
        moved += 3 * self.stored * shard * (self.microbatches > 1 and not self.pipelined)
        return moved + (2 * self.reduced * trained.full_size if ranks == 1 else 2 * width * inner(trained))


def inner(unit: WeightUnit) -> int:
    """Return the elements, unsharded, of the unit's tensors that are sharded along a dim other than the first."""
    return sum(prod(shape) for shape, dim in zip(unit.shapes, unit.dims, strict=True) if dim)


class WeightCosts(BlockCosts):
    """Seconds of the weights and gradients of one model, under any mapping."""

    def sizes(self, fold: Fold, vocabulary: int = 0) -> Sizes:
        """Return the weight units of a rank. `vocabulary`: ranks that shard the vocabulary; 0 for those of tp."""
        return Sizes(self.model, fold, Tuning.of(self.config), vocabulary)

    def weights(self, config: Config, fold: Fold, sizes: Sizes, layer: int) -> tuple[float, float, float]:
        """Return the seconds of the messages of block `layer`'s weights and gradients, as (gather, reduce, last).

        `gather` is one gather of the weights, `reduce` one reduction of the trained ones' gradients over shards and
        replicas, and `last` the sum, once a step, of the gradients of experts outside FSDP over their replicas; 0 if
        FSDP has them. The router's are not counted. Computation that hides messages is not subtracted.

        Args:
            config: recipe, with the sharding options of the mapping.
            sizes: weight units of the rank under `fold`.
        """
        gather = reduce = last = 0.0
        units = [
            (
                sizes.block(layer),
                LinkGroup(fsdp(fold), fold.tp),
                LinkGroup(fold.dp_replicate, fold.stage // fold.dp_replicate),
            )
        ]
        if has_experts(self.model, layer):
            inner = fold.ep * fold.etp
            replicas = LinkGroup(fold.edp_replicate, inner * fold.edp)
            units.append((sizes.experts_of(layer), LinkGroup(fold.edp, inner), replicas))
        for unit, group, replicas in units:
            gather += self.links.gather(group, unit.full_size * self.w)
            count = unit.trained.full_size
            if not count:
                continue
            reduce += self.links.gather(group, count * self.reduced_width)
            over_replicas = 2 * self.links.gather(replicas, count / group.size * self.reduced_width)
            if unit is units[0][0] or not self.leaves_out_experts(config, fold):
                reduce += over_replicas
            else:
                last += over_replicas
        return gather, reduce, last

    def weight_copies(self, config: Config, fold: Fold, m: int) -> WeightCopies | None:
        """Return the formulas of how FSDP2 copies weights and gradients; None for a stack without FSDP2.

        Args:
            config: recipe, with the sharding options of the mapping.
            m: microbatches of a step.
        """
        if not self.stack.fsdp2:
            return None
        return WeightCopies(
            stored=WIDTHS[config.training.dtype],
            computed=self.w,
            reduced=self.reduced_width,
            each_microbatch=self.gathers_often(config, fold),
            pipelined=not self.reduces_often(config, fold),
            microbatches=m,
            accumulated=config.moe.accumulate_weight_gradients,
        )

    def block_copies(
        self, copies: WeightCopies | None, config: Config, fold: Fold, sizes: Sizes, layer: int
    ) -> tuple[float, float]:
        """Return the seconds to copy weights and gradients of block `layer`, as (for each microbatch, for each step).

        Its experts are included.

        Args:
            copies: formulas of FSDP2; None gives zeros.
            config: recipe, with the sharding options of the mapping.
            sizes: weight units of the rank under `fold`.
        """
        if copies is None:
            return 0.0, 0.0
        moved = [copies.moved(sizes.block(layer), fsdp(fold))]
        if has_experts(self.model, layer):
            experts = sizes.experts_of(layer)
            if self.leaves_out_experts(config, fold):
                moved.append(copies.moved_unsharded(experts, fold.edp_replicate))
            else:
                moved.append(copies.moved(experts, fold.edp))
        return self._copy_seconds(*moved)

    def leaves_out_experts(self, config: Config, fold: Fold) -> bool:
        """Return whether the experts are outside FSDP: if the stack does so and `experts_are_unsharded`."""
        return self.stack.unshards_experts and experts_are_unsharded(config.parallelism, config.training, fold.edp)

    def edge_copies(self, copies: WeightCopies | None, fold: Fold, unit: WeightUnit) -> tuple[float, float]:
        """Return the seconds to copy embedding or head and its gradients, as (for each microbatch, for each step).

        A microbatch gathers it once, not twice as a block. Zeros if `copies` is None.
        """
        return (0.0, 0.0) if copies is None else self._copy_seconds(copies.moved(unit, fsdp(fold), 1))

    def _copy_seconds(self, *moved: tuple[int, int]) -> tuple[float, float]:
        """Return the seconds of (each microbatch, each step) for copies given as such pairs of bytes.

        Copies share the device with computation, so nothing hides them.
        """
        microbatch, step = map(sum, zip(*moved, strict=True))
        rate = self.device.bandwidth * self.factors.memory
        return microbatch / rate, step / rate

    def gathers_often(self, config: Config, fold: Fold) -> bool:
        """Return whether weights are gathered for each microbatch, rather than once a step.

        As parallelism.reshard_after_forward says, also where nothing is sharded; "auto" is "always" without a pipeline.
        """
        choice = config.parallelism.reshard_after_forward
        return choice == "always" or (choice == "auto" and fold.pp == 1)

    def reduces_often(self, config: Config, fold: Fold) -> bool:
        """Return whether gradients are reduced for each microbatch, rather than once a step.

        They are if there is neither a pipeline nor parallelism.reduce_once.
        """
        return fold.pp == 1 and not config.parallelism.reduce_once

    def weights_exposed(
        self, config: Config, fold: Fold, sizes: Sizes, blocks: list[tuple[int, int]], m: int, busy: Cost
    ) -> float:
        """Return the seconds that messages of weights and gradients add to a step, beyond hidden ones.

        They are those of the blocks on the first pipeline rank and of the head; the embedding's are left out.

        Args:
            config: the recipe that is priced.
            blocks: (number of blocks, index of one of them) of each kind on the first pipeline rank.
            m: microbatches of a step.
            busy: cost of a microbatch on the slowest pipeline rank.
        """
        gather = reduce = last = 0.0
        for count, layer in blocks:
            times = self.weights(config, fold, sizes, layer)
            gather, reduce, last = (
                x + count * seconds for x, seconds in zip((gather, reduce, last), times, strict=True)
            )
        group = LinkGroup(fsdp(fold), fold.tp)
        gather += self.links.gather(group, sizes.head.full_size * self.w)
        reduce += self.links.gather(group, sizes.head.trained.full_size * self.reduced_width)
        behind = busy.matrix + busy.attention + busy.memory
        if fold.tp * fold.cp <= self.device.domain < group.size * fold.tp:
            behind += busy.tp + busy.cp  # those are on the other link
        if fold.ep * fold.etp <= self.device.domain < fold.edp * fold.ep * fold.etp:
            behind += busy.dispatch
        forward, backward = behind / 3, behind * 2 / 3
        gathers, reduces = self.gathers_often(config, fold), self.reduces_often(config, fold)
        each, after = gather * gathers + reduce * reduces, last + reduce * (not reduces)
        backwards = (m - 1) * self.links.exposed(each, backward) + self.links.exposed(each + after, backward)
        # Nothing hides the first gather of a forward and the last reduction of a backward.
        units = sum(count for count, _ in blocks) + 1
        end_seconds = (gather * (m if gathers else 1) + reduce * (m if reduces else 1)) / units
        return (m if gathers else 1) * self.links.exposed(gather, forward) + backwards + end_seconds
