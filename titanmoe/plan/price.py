"""Seconds of a step: blocks under a schedule, messages of weights and gradients, the optimizer.

`Pricer.price` is what `titanmoe plan` prints for a mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from titanmoe.config.blocks import has_experts, moe_layers
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.pipeline_schedules import COST, stage_ranks
from titanmoe.models.count import flops_per_token
from titanmoe.models.tensors import Tuning
from titanmoe.plan.cost import Cost
from titanmoe.plan.devices import Device
from titanmoe.plan.dispatch_costs import DispatchChoice, hidden_by_pairs
from titanmoe.plan.links import Factors, LinkGroup
from titanmoe.plan.memory import stages_of
from titanmoe.plan.muon_work import muon_work
from titanmoe.plan.schedule_cost import schedule_idle, shared_idle
from titanmoe.plan.sizes import Sizes, fsdp, microbatches, vocabulary_ranks
from titanmoe.plan.training_stacks import TITANMOE, Stack
from titanmoe.plan.weight_costs import WeightCosts
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS

UPDATE = 28
"""Bytes that the gradient norm, clipping and the update move per float32 weight, without the optimizer's moments."""


@dataclass
class Price:
    """Time of a training step under one mapping."""

    step: float
    """Seconds of a step."""
    components: dict[str, float]
    """Seconds by component; they add up to the step."""
    tokens: float
    """Tokens per second and device."""
    mfu: float
    """Model FLOPs utilization, a fraction of the peak of the compute dtype."""
    microbatches: int
    """Microbatches of a step on each data rank."""

    @property
    def bottleneck(self) -> str:
        """Key in `components` of what takes the most time after matrix work, such as "bubble"."""
        rest = {name: t for name, t in self.components.items() if name != "matrix work"}
        return max(rest, key=rest.__getitem__)


NAMES = {
    "matrix": "matrix work",
    "attention": "attention",
    "memory": "memory-bound work",
    "host": "waiting for the host",
    "tp": "messages of tp",
    "cp": "messages of cp",
    "dispatch": "dispatch and combine",
    "copies": "copies of weights",
}


class BlockKind(NamedTuple):
    """Key of blocks that have the same price under one mapping."""

    experts: bool
    """Whether the block has experts."""
    first_alike: int
    """Index of the first block with an equal mixer of which as much is trained."""
    recomputed: bool
    """Whether the recipe's recomputation applies to the block."""


def blocks_of_rank(
    stages: list[dict[BlockKind, tuple[int, int]]], owners: list[int], rank: int
) -> dict[BlockKind, int]:
    """Return the number of blocks of each kind on a pipeline rank.

    Args:
        stages: for each stage and kind, the number of blocks and the index of one of them.
        owners: pipeline rank of each stage.
        rank: the pipeline rank.
    """
    counts: dict[BlockKind, int] = {}
    for owner, stage in zip(owners, stages, strict=True):
        if owner == rank:
            for kind, (count, _) in stage.items():
                counts[kind] = counts.get(kind, 0) + count
    return counts


class Pricer(WeightCosts):
    """Step times of one model and batch on one device, under any mapping."""

    def __init__(
        self, config: Config, device: Device, factors: Factors, imbalance: float = 1.0, stack: Stack = TITANMOE
    ):
        super().__init__(config, device, factors, imbalance, stack)
        self.flops = flops_per_token(self.model, config.training.seq_len, Tuning.of(config))
        self.counts = cache(self._counts)

    def _counts(
        self, stages: int, every: int, uneven: tuple[int, ...], shared: bool
    ) -> list[dict[BlockKind, tuple[int, int]]]:
        """Return, for each stage and kind of block, the number of blocks and the index of one of them.

        Layers are divided among stages as the stack divides them.

        Args:
            stages: number of stages, of all pipeline ranks together.
            every: activation_checkpoint.every: layers 0, every, 2 * every and so on count as recomputed.
            uneven: pipeline.layers_per_stage.
            shared: whether all stages share the vocabulary.
        """
        if self.stack.balances_stages or uneven:
            split = stages_of(self.config, stages, uneven, shared)
        else:
            each, more = divmod(self.model.num_layers, stages)
            ends = [each * (i + 1) + min(i + 1, more) for i in range(stages)]
            split = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        stage_counts = []
        for layers in split:
            stage: dict[BlockKind, tuple[int, int]] = {}
            for layer in layers:
                kind = BlockKind(has_experts(self.model, layer), self.first_alike[layer], layer % every == 0)
                stage[kind] = stage.get(kind, (0, 0))[0] + 1, layer
            stage_counts.append(stage)
        return stage_counts

    def stages(
        self, config: Config, fold: Fold
    ) -> tuple[list[int], list[dict[BlockKind, tuple[int, int]]], dict[BlockKind, int]]:
        """Return how many blocks of each kind the stages have, and where the stages are.

        Args:
            config: recipe, with the schedule, recomputation and vocab of the mapping.

        Returns:
            The pipeline rank of each stage; for each stage and kind (number of blocks, index of one of them); and for
            each kind the index of one of its blocks.
        """
        owners = stage_ranks(config.pipeline, fold.pp)
        every, uneven = config.activation_checkpoint.every, tuple(config.pipeline.layers_per_stage)
        stages = self.counts(len(owners), every, uneven, config.parallelism.vocab == "pipeline")
        return owners, stages, {kind: layer for stage in stages for kind, (_, layer) in stage.items()}

    def first_rank_blocks(self, config: Config, fold: Fold) -> list[tuple[int, int]]:
        """Return (number of blocks, index of one of them) for each kind of block on the first pipeline rank.

        Args:
            config: recipe, with the schedule, recomputation and vocab of the mapping.
        """
        owners, stages, layers = self.stages(config, fold)
        return [(count, layers[kind]) for kind, count in blocks_of_rank(stages, owners, 0).items()]

    def price(self, config: Config, fold: Fold, least: bool = False) -> Price:
        """Return the estimated time of a step by component, the tokens per second and the MFU.

        Components of microbatches are those of the slowest pipeline rank. Memory is not checked, nor are laws.

        Args:
            config: the pricer's config, of which mapping, microbatch, schedule and recomputation may differ.
            least: whether to return a lower bound where all stages share the vocabulary, without a simulation of them:
                no shorter idle time than that of the layers alone.
        """
        training, model, shared = config.training, self.model, config.parallelism.vocab == "pipeline"
        samples, m = training.local_batch_size, microbatches(config, fold)
        sizes, options = self.sizes(fold, vocabulary_ranks(config, fold)), config.activation_checkpoint
        owners, stages, layers = self.stages(config, fold)
        choice = self.dispatch_choice(config, fold, m, len(owners))
        modes = {kind: options.mode if kind.recomputed else "none" for kind in layers}
        blocks = {kind: self.block(fold, samples, layer, choice, modes[kind]) for kind, layer in layers.items()}
        copy_formulas = self.weight_copies(config, fold, m)
        copies = {kind: self.block_copies(copy_formulas, config, fold, sizes, layer) for kind, layer in layers.items()}
        blocks = {kind: cost + Cost(copies=copies[kind][0]) for kind, cost in blocks.items()}
        seconds = {kind: cost.seconds for kind, cost in blocks.items()}
        hop = self.hop(fold.pp, fold.stage, samples, fold.tp * fold.cp)
        ends = self.head(fold.tp, fold.cp, samples, fold.pp if shared else 1).times(1 + model.mtp_depth)
        last_kind = next(kind for stage in reversed(stages) for kind in reversed(stage))  # the last may have no layers
        extra = blocks[last_kind].times(model.mtp_depth)
        edge_copies = [self.edge_copies(copy_formulas, fold, unit) for unit in (sizes.embedding, sizes.head)]
        ranks = [0.0] * fold.pp
        for owner, stage in zip(owners, stages, strict=True):
            ranks[owner] += sum(seconds[kind] * count for kind, (count, _) in stage.items()) + 2 * hop
        ranks[owners[-1]] += extra.seconds
        meetings = of_layers = 0.0
        if shared:  # on every rank, and a message to all from the last or the first, or to it
            meetings = self.vocabulary_messages(fold, samples)
            loss, of_layers = ends.seconds + sum(copy for copy, _ in edge_copies) + meetings, sum(ranks)
            ranks = [seconds + loss for seconds in ranks]
        else:
            ranks[0] += edge_copies[0][0]
            ranks[owners[-1]] += ends.seconds + edge_copies[1][0]
        counts = [blocks_of_rank(stages, owners, rank) for rank in range(fold.pp)]
        launches = [sum(n * self.launches(fold, modes[kind]) for kind, n in count.items()) for count in counts]
        ranks = list(map(max, ranks, launches))  # where the host takes longer, the device waits for it
        worst = max(range(fold.pp), key=ranks.__getitem__)
        slowest, copies_per_step = ends if shared or owners[-1] == worst else Cost(), 0.0
        slowest = slowest + extra.times(owners[-1] == worst)
        for owner, (microbatch, step) in zip((0, owners[-1]), edge_copies, strict=True):
            if shared or owner == worst:
                slowest, copies_per_step = slowest + Cost(copies=microbatch), copies_per_step + step
        for kind, count in counts[worst].items():
            slowest = slowest + blocks[kind].times(count)
            copies_per_step += count * copies[kind][1]
        messages = 2 * hop * owners.count(worst) + meetings
        slowest = slowest + Cost(host=max(0.0, launches[worst] - slowest.seconds - messages))
        busy = m * (slowest.seconds + messages)
        mean, per_rank = sum(ranks) / fold.pp, len(owners) // fold.pp
        if shared:
            layers_alone = max(of_layers, sum(launches)) / fold.pp
            # A loss is as long as so many forwards of a stage, of which a rank has several.
            relative = round((mean - layers_alone) / (layers_alone / sum(COST[does] for does in "FB") / per_rank), 2)
            if least:
                bubble = layers_alone * self.idle(config, fold, per_rank, m)
            else:
                bubble = mean * shared_idle(config.pipeline.schedule, fold.pp, per_rank, m, relative)
        else:
            bubble = mean * self.idle(config, fold, per_rank, m)

        first_rank_blocks = self.first_rank_blocks(config, fold)
        exposed_weights = self.weights_exposed(config, fold, sizes, first_rank_blocks, m, slowest)
        optimizer = self._optimizer_seconds(config, fold, sizes, first_rank_blocks)
        components = {NAMES[key]: m * value for key, value in slowest._asdict().items()}
        components[NAMES["copies"]] += copies_per_step
        components |= {
            "messages of pp": m * messages,
            "bubble": bubble,
            "weights and gradients": exposed_weights,
            "optimizer": optimizer,
        }
        step = busy + copies_per_step + bubble + exposed_weights + optimizer
        tokens = training.global_batch_size * training.seq_len / step / fold.world
        return Price(step, components, tokens, tokens * self.flops / self.peak, m)

    def _optimizer_seconds(self, config: Config, fold: Fold, sizes: Sizes, blocks: list[tuple[int, int]]) -> float:
        """Return the seconds of the optimizer's step on a rank of the first stage, Muon's matrices included.

        Args:
            blocks: number of blocks, and index of one of them, by kind, from `first_rank_blocks`.
        """
        data, sharded_weights = fsdp(fold), 0
        for count, layer in blocks:
            sharded_weights += count * sizes.block(layer).trained.shard_size(data)
            if has_experts(self.model, layer):
                sharded_weights += count * sizes.experts_of(layer).trained.shard_size(fold.edp)
        edges = (sizes.embedding.trained.shard_size(data) + sizes.head.trained.shard_size(data)) // (
            1 if fold.pp == 1 or config.parallelism.vocab == "pipeline" else 2
        )
        moved = UPDATE + 8 * OPTIMIZERS.look_up(config.optimizer.name).numbers_per_weight
        seconds = (sharded_weights + edges) * moved / (self.device.bandwidth * self.factors.memory)
        return seconds + self.matrices(config, fold)

    def dispatch_choice(self, config: Config, fold: Fold, m: int, stages: int) -> DispatchChoice:
        """Return moe.dispatcher as it is, and how moe.overlap hides messages: by halves, or a fraction by pairs.

        Pairs hide nothing without a pipeline or with a schedule file.

        Args:
            m: microbatches of a step: the more, the more of them are in pairs.
            stages: stages of all pipeline ranks: the fewer, the more MoE layers are in each, and the more a pair hides.
        """
        hidden = 0.0
        if config.moe.overlap == "pairs" and fold.pp > 1 and not config.pipeline.schedule_csv:
            hidden = hidden_by_pairs(fold.pp, m, moe_layers(self.model) / stages)
        return DispatchChoice(config.moe.dispatcher, config.moe.overlap == "halves", hidden)

    def matrices(self, config: Config, fold: Fold) -> float:
        """Return the seconds of Muon's Newton-Schulz and its messages in a step; 0 for other optimizers."""
        if not OPTIMIZERS.look_up(config.optimizer.name).numbers_per_matrix_weight:
            return 0.0
        work = muon_work(config, fold)
        rate = self.device.peak(config.optimizer.ns_dtype) * self.factors.matrix
        attention = LinkGroup(fold.dp_shard * fold.cp * fold.tp, 1), work.attention_bytes
        experts = LinkGroup(fold.edp * fold.etp, 1 if fold.etp > 1 else fold.ep), work.expert_bytes
        # All that a rank sends goes there and back, in an all-to-all each.
        return work.flops / rate + sum(2 * self.links.exchange(group, sent / 2) for group, sent in (attention, experts))

    def hop(self, pp: int, stage: int, samples: int, sample_ranks: int) -> float:
        """Return the seconds to send a microbatch's hidden states to the next pipeline stage; 0 without a pipeline.

        Args:
            stage: ranks of a stage, and so the distance of the next one.
            samples: samples of the microbatch.
            sample_ranks: ranks that a sample is divided among, tp x cp.
        """
        size = samples * self.config.training.seq_len / sample_ranks * self.model.dim * self.w
        return self.links.send(stage, size) if pp > 1 else 0.0

    def vocabulary_messages(self, fold: Fold, samples: int) -> float:
        """Return the seconds of a microbatch's messages over pp where all stages share the vocabulary.

        They are the sums of the embeddings and of the gradients of the last hidden states, to one rank, and these
        states and the embeddings' gradients, from one rank; each is as long as a gather, and there are twice as many
        bytes with multi-token prediction. Computation that may hide them is not considered.
        """
        size = samples * self.config.training.seq_len / (fold.tp * fold.cp) * self.model.dim * self.w
        return 4 * (1 + self.model.mtp_depth) * self.links.gather(LinkGroup(fold.pp, fold.stage), size)

    def idle(self, config: Config, fold: Fold, per_rank: int, m: int) -> float:
        """Return the idle time of a pipeline rank in a step, over the busy time of one microbatch.

        0 without a pipeline, and pp - 1 for a schedule file.

        Args:
            per_rank: stages of a rank.
            m: microbatches of a step.
        """
        if fold.pp == 1:
            return 0.0
        if config.pipeline.schedule_csv:
            return float(fold.pp - 1)
        return schedule_idle(config.pipeline.schedule, fold.pp, per_rank, m)

    def least_weights_exposed(self, config: Config, fold: Fold, busy: float) -> float:
        """Return a lower bound of the seconds that messages of weights and gradients add to a step.

        It may be added to the least time of the microbatches: a slower rank hides no more than it takes longer.

        Args:
            config: the recipe, with the reshard_after_forward that gathers weights least often.
            busy: lower bound of the seconds of a microbatch on a pipeline rank, all of which may hide messages.
        """
        blocks, m = self.first_rank_blocks(config, fold), microbatches(config, fold)
        return self.weights_exposed(config, fold, self.sizes(fold), blocks, m, Cost(matrix=busy))
