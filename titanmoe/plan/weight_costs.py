"""Seconds of weights and gradients in a step: their messages, which computation may hide, and FSDP2's copies of them.

Pricer (titanmoe.plan.price) adds them to the blocks of a mapping.
"""

from __future__ import annotations

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
from titanmoe.plan.weight_copies import WeightCopies


class WeightCosts(BlockCosts):
    """Seconds of the weights and gradients of one model, under any mapping."""

    def sizes(self, fold: Fold, vocabulary: int = 0) -> Sizes:
        """Return the weight units of a rank. `vocabulary`: ranks that shard the vocabulary; 0 for those of tp."""
        return Sizes(self.model, fold, Tuning.of(self.config), vocabulary)

    def weights(self, config: Config, fold: Fold, sizes: Sizes, layer: int) -> tuple[float, float, float]:
        """Return the seconds of the messages of block `layer`'s weights and gradients, as (gather, reduce, last).

        `gather` is one gather of the weights, `reduce` one reduction of the gradients, and `last` the sum, once a step,
        of the gradients of experts outside FSDP over their replicas.

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

        Zeros if `copies` is None.
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

        They are without a pipeline, unless parallelism.reduce_once says otherwise.
        """
        return fold.pp == 1 and not config.parallelism.reduce_once

    def weights_exposed(
        self,
        config: Config,
        fold: Fold,
        sizes: Sizes,
        blocks: dict[tuple[bool, int], tuple[int, int]],
        m: int,
        busy: Cost,
    ) -> float:
        """Return the seconds that messages of weights and gradients add to a step, beyond hidden ones.

        Args:
            config: the recipe that is priced.
            blocks: (number of blocks, index of one of them) by kind, on the first pipeline rank; keys are not used.
            m: microbatches of a step.
            busy: cost of a microbatch on the slowest pipeline rank.
        """
        gather = reduce = last = 0.0
        for count, layer in blocks.values():
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
        units = sum(count for count, _ in blocks.values()) + 1
        end_seconds = (gather * (m if gathers else 1) + reduce * (m if reduces else 1)) / units
        return (m if gathers else 1) * self.links.exposed(gather, forward) + backwards + end_seconds
