"""The time of a step: blocks under a schedule, weights and gradients on their way, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from titanmoe.config.blocks import has_experts, window
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.schedules import stage_ranks
from titanmoe.models.count import flops_per_token
from titanmoe.plan.devices import Device
from titanmoe.plan.halves import OURS, Cost, Halves, Stack
from titanmoe.plan.links import Factors, Group
from titanmoe.plan.memory import stages_of
from titanmoe.plan.schedule import played
from titanmoe.plan.sizes import Sizes, fsdp

OPTIMIZER = 44
"""Bytes that AdamW, the norm and clipping move per weight in float32."""


@dataclass
class Price:
    step: float
    components: dict[str, float]
    """In seconds; they add up to the step."""
    tokens: float
    """Per second and device."""
    mfu: float
    microbatches: int

    @property
    def binds(self) -> str:
        """What takes the most time after matrix work."""
        rest = {name: t for name, t in self.components.items() if name != "matrix work"}
        return max(rest, key=rest.get)


NAMES = {
    "matrix": "matrix work",
    "attention": "attention",
    "memory": "memory-bound work",
    "host": "waiting for the host",
    "tp": "messages of tp",
    "cp": "messages of cp",
    "rows": "rows to experts and back",
}


class Pricer(Halves):
    """Prices mappings of one model, batch and world."""

    def __init__(self, config: Config, device: Device, factors: Factors, stack: Stack = OURS, imbalance: float = 1.0):
        super().__init__(config, device, factors, stack, imbalance)
        self.flops = flops_per_token(self.model, config.training.seq_len)
        self.splits = lru_cache(maxsize=None)(self._split)

    def _split(self, stages: int) -> list[range]:
        n = self.model.num_layers
        if self.stack.even_split:
            each, more = divmod(n, stages)
            ends = [each * (i + 1) + min(i + 1, more) for i in range(stages)]
            return [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        return stages_of(self.config, stages)

    def weights(self, fold: Fold, sizes: Sizes, layer: int) -> tuple[float, float]:
        """Seconds to gather a block's weights once, and to reduce its gradients once."""
        reduced = max(self.w, WIDTHS[self.config.training.mixed_precision_reduce])
        gather = reduce = 0.0
        parts = [
            (
                sizes.block(layer).whole,
                Group(fsdp(fold), fold.tp),
                Group(fold.dp_replicate, fold.stage // fold.dp_replicate),
            )
        ]
        if has_experts(self.model, layer):
            inner = fold.ep * fold.etp
            replicas = Group(fold.edp_replicate, inner * fold.edp)
            parts.append((sizes.experts.whole, Group(fold.edp, inner), replicas))
        for count, group, replicas in parts:
            gather += self.links.gather(group, count * self.w)
            reduce += self.links.gather(group, count * reduced)
            reduce += 2 * self.links.gather(replicas, count / group.size * reduced)
        return gather, reduce

    def price(self, config: Config, fold: Fold) -> Price:
        """config: this pricer's, with another mapping, microbatch, schedule or recomputation."""
        training, model = config.training, self.model
        samples = training.local_batch_size
        m = max(1, training.global_batch_size // (samples * fold.dp))
        owners = stage_ranks(config.pipeline, fold.pp)
        uneven = config.pipeline.layers_per_stage
        layers = stages_of(config, len(owners)) if uneven else self.splits(len(owners))
        sizes = Sizes(model, fold.tp, fold.ep, fold.etp, fold.edp)
        options, dispatcher = config.activation_checkpoint, config.moe.dispatcher
        kinds: dict[tuple, Cost] = {}

        def block(layer: int) -> Cost:
            key = has_experts(model, layer), window(model, layer), layer % options.every == 0
            if key not in kinds:
                mode = options.mode if key[2] else "none"
                kinds[key] = self.block(fold, samples, layer, dispatcher, mode)
            return kinds[key]

        head = self.head(fold.tp, fold.cp, samples)
        per_rank = []
        hop = self.hop(fold.pp, fold.stage, samples, fold.tp * fold.cp)
        for rank in range(fold.pp):
            mine = [i for i, owner in enumerate(owners) if owner == rank]
            total, messages = Cost(), 0.0
            for stage in mine:
                counts: dict[Cost, int] = {}
                for layer in layers[stage]:
                    one = block(layer)
                    counts[one] = counts.get(one, 0) + 1
                for one, count in counts.items():
                    total = total + one.times(count)
                if stage == len(owners) - 1:
                    total = total + head + (block(model.num_layers - 1) + head).times(model.mtp_depth)
                messages += 2 * hop
            per_rank.append((total, messages))
        slowest, messages = max(per_rank, key=lambda one: one[0].seconds + one[1])
        mean = sum(one.seconds + more for one, more in per_rank) / fold.pp
        busy = m * (slowest.seconds + messages)
        bubble = mean * self._idle(config, fold, len(owners) // fold.pp, m)

        mine = [layer for i, owner in enumerate(owners) if owner == 0 for layer in layers[i]]
        exposed = self._weights_exposed(config, fold, sizes, mine, m, slowest)
        kept = sum(
            sizes.block(i).piece(fsdp(fold)) + (sizes.experts.piece(fold.edp) if has_experts(model, i) else 0)
            for i in mine
        )
        ends = (sizes.embedding.piece(fsdp(fold)) + sizes.head.piece(fsdp(fold))) // (1 if fold.pp == 1 else 2)
        optimizer = (kept + ends) * OPTIMIZER / (self.device.bandwidth * self.factors.memory)
        components = {NAMES[key]: m * value for key, value in slowest._asdict().items()}
        components |= {
            "messages of pp": m * messages,
            "bubble": bubble,
            "weights and gradients": exposed,
            "optimizer": optimizer,
        }
        step = busy + bubble + exposed + optimizer
        tokens = training.global_batch_size * training.seq_len / step / fold.world
        return Price(step, components, tokens, tokens * self.flops / self.peak, m)

    def hop(self, pp: int, stage: int, samples: int, share: int) -> float:
        """A microbatch's hidden states to the next stage."""
        size = samples * self.config.training.seq_len / share * self.model.dim * self.w
        return self.links.send(stage, size) if pp > 1 else 0.0

    def _idle(self, config: Config, fold: Fold, per_rank: int, m: int) -> float:
        if fold.pp == 1:
            return 0.0
        if config.pipeline.schedule_csv:
            return float(fold.pp - 1)
        return played(config.pipeline.schedule, fold.pp, per_rank, m).idle

    def _weights_exposed(self, config: Config, fold: Fold, sizes: Sizes, mine: list[int], m: int, busy: Cost) -> float:
        """Seconds of a step in which nothing is computed because weights or gradients are under way."""
        stack, kinds = self.stack, {}
        for layer in mine:
            kinds[has_experts(self.model, layer)] = kinds.get(has_experts(self.model, layer), 0) + 1
        gather = reduce = 0.0
        for experts, count in kinds.items():
            layer = next(i for i in mine if has_experts(self.model, i) == experts)
            one = self.weights(fold, sizes, layer)
            gather, reduce = gather + count * one[0], reduce + count * one[1]
        ends = sizes.head.whole
        group = Group(fsdp(fold), fold.tp)
        gather += self.links.gather(group, ends * self.w)
        reduce += self.links.gather(group, ends * max(self.w, WIDTHS[config.training.mixed_precision_reduce]))
        how = stack.gathers
        if how == "auto":
            freed = config.parallelism.reshard_after_forward
            how = "microbatch" if freed == "always" or (freed == "auto" and fold.pp == 1) else "step"
        behind = self.factors.hidden * (busy.matrix + busy.attention + busy.memory)
        if how == "microbatch":
            return m * (max(0.0, gather - behind / 3) + max(0.0, gather + reduce - behind * 2 / 3))
        if how == "step" and fold.pp == 1:
            return m * max(0.0, reduce - behind * 2 / 3) + max(0.0, gather - behind / 3)
        return max(0.0, gather - behind / 3) + max(0.0, reduce - behind * 2 / 3)
