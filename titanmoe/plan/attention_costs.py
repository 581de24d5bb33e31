"""Seconds of a block's mixer: attention's projections and kernels, and the messages of tp and cp.

BlockCosts (titanmoe.plan.block_costs) adds the feed-forward network or the experts. All times are those of the slowest
rank.

Shapes: T tokens a rank owns, X positions of its attention slice (T times tp), D model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from titanmoe.config.schema import Config
from titanmoe.fold.attention_backend import head_widths, kernel_refuses
from titanmoe.fold.degrees import sequence_chunks
from titanmoe.models.mixers.mixer_spec import MixerSpec, MixerWork
from titanmoe.plan.cost import Cost
from titanmoe.plan.dispatch_costs import BLOCK_KERNELS, DispatchCosts
from titanmoe.plan.links import LinkGroup
from titanmoe.plan.sizes import ADDED, DROPPED, DROPPED_KERNELS, KERNELS, Adapter

BACKWARD = 2.0
"""FLOPs of matrix products in backward, relative to forward."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention in backward, relative to forward: it recomputes its scores (arXiv 2205.14135)."""
RING = (((16, 27), (4, 4)), ((26, 17), (44, 22)))
"""Bytes that torch's ring of context parallelism moves around its kernels to slice shards and to merge their results,
per element in 16 bits, forward and backward: of queries, and of keys and values; once, and for each shard that comes
around. Counted in rehearsals (tests/plan/test_price.py)."""
RING_KERNELS = (5, 13), (15, 10)
"""Kernels that the same rehearsals count, once and for each shard that comes around."""
RING_RATE = 0.35 * 989.5e12
"""Largest FLOPs per second of the ring's attention where FlashAttention-2 computes it, which reaches 35 % of an H100's
peak (arXiv 2407.08608, abstract), where attention without a ring is cuDNN's on Hopper (torch 2.13, sdp_utils.cpp)."""
SHORT_CAUSAL, SHORT = 900, 190
"""Attention in samples of n tokens takes 1 + SHORT_CAUSAL / n times as long per FLOP as in very long ones, or without a
causal mask 1 + SHORT / n: cuDNN's 627, 827, 977, 1072 and 1120 TFLOP/s at 1,024 to 16,384 tokens, and 979, 1069, 1113,
1147 and 1153 without (B200, heads of 64; github.com/Dao-AILab/flash-attention/pull/2605)."""
WIDE, NARROW = 128, 64
"""Widths of heads: from the first on attention reaches its full rate; narrower ones take more exponentials for the same
FLOPs, and at the second reach two thirds of it (arXiv 2407.08608, figure 5). None narrower was looked at."""


class BackwardFactors(NamedTuple):
    """FLOPs of backward relative to those of forward, for the parts of one block; below 2 where weights are frozen."""

    products: float = BACKWARD
    """Factor of attention's projections."""
    scores: float = BACKWARD
    """Factor of attention's scores and of their product with the values."""
    ffn: float = BACKWARD
    """Factor of the dense network or the experts."""


def _ring_slowdown(seq: int, cp: int) -> float:
    """Return attention's time per FLOP in a ring of `cp` ranks, over that of one kernel for the full sample.

    `seq` is the tokens of a sample. Each rank computes cp pairs of shards. One of them is causal, the others are not,
    and short ones are slower.
    """
    short = cp / seq
    return ((1 + SHORT_CAUSAL * short) + (cp - 1) * (1 + SHORT * short)) / cp / (1 + SHORT_CAUSAL / seq)


class AttentionCosts(DispatchCosts):
    """Forward and backward costs of mixers, and of what mixers and feed-forward networks share.

    Base class of `BlockCosts`, which sets the fields.
    """

    config: Config
    peak: float
    """FLOPs per second in the compute dtype."""
    mixers: list[MixerSpec]
    """Mixer of each block."""
    backward: list[BackwardFactors]
    """Backward factors of each block and, last, of the head."""
    adapters: list[list[Adapter]]
    """LoRA adapters of each block."""
    most: float
    """Most that backward's products count."""
    product: Callable[..., float]
    """`price_product`, cached."""

    def price_product(self, m: float, n: float, k: float, peak: float = 0.0) -> float:
        """Return the seconds of one (m, k) by (k, n) product: by FLOPs or by bytes, whichever take longer.

        Bytes are those of the compute dtype, whatever `peak` is. The launch is not included.

        Args:
            peak: FLOPs per second of the device; 0 for those of the compute dtype.
        """
        fraction = min(1.0, self.device.peak_fraction(m, n, k) * self.factors.matrix)
        move_seconds = self.w * (m * n + n * k + m * k) / (self.device.bandwidth * self.factors.memory)
        return max(2 * m * n * k / ((peak or self.peak) * fraction), move_seconds)

    def price_norms(self, elements: float, direction: int) -> float:
        """Return the seconds of a norm and a residual sum over these elements. `direction`: 0 forward, 1 backward."""
        return self.move_seconds(elements * (self.stack.norm[direction] + self.stack.residual[direction]))

    def price_adapters(
        self, adapters: list[Adapter], prefix: str, tokens: float, split: int, groups: float = 1.0
    ) -> tuple[Cost, Cost]:
        """Return the costs (forward, backward) that LoRA adapters add to the matrices whose names begin with `prefix`.

        Products of backward are twice those of forward. Messages are not included.

        Args:
            adapters: all adapters of the block.
            prefix: first part of the names, such as "attention.".
            tokens: tokens that each product multiplies.
            split: ranks of tp or etp that divide an adapter's split dims.
            groups: number of equal products of `tokens` tokens each, such as one for each expert.
        """
        forward = backward = Cost()
        drops = self.config.lora.dropout > 0
        for adapter in adapters:
            if not adapter.name.startswith(prefix):
                continue
            inputs = adapter.inputs / (split if adapter.inputs_split else 1)
            outputs = adapter.outputs / (split if adapter.outputs_split else 1)
            product = self.product(tokens, adapter.rank, inputs) + self.product(tokens, outputs, adapter.rank)
            products = groups * product
            costs = [
                Cost(
                    matrix=products * factor,
                    memory=self.move_seconds(groups * tokens * (width * ADDED + inputs * dropped * drops)),
                    host=self.factors.block * (kernels + more * drops) / BLOCK_KERNELS,
                )
                for factor, width, kernels, dropped, more in zip(
                    (1.0, BACKWARD), (outputs, inputs), KERNELS, DROPPED, DROPPED_KERNELS, strict=True
                )
            ]
            forward, backward = forward + costs[0], backward + costs[1]
        return forward, backward

    def _mixer_bytes(self, work: MixerWork, direction: int) -> float:
        """Return the bytes that a mixer moves per position between its matrix products, such as for rotation.

        They are bytes of 16-bit numbers; `move_seconds` scales them to the compute dtype.

        Args:
            direction: 0 forward, 1 backward.
        """
        rotated = 4 * work.queries if self.stack.joins_latent_heads and self.model.kv_lora_rank else work.rotated
        return (
            rotated * self.stack.rope[direction] + work.normed * self.stack.norm[direction] + 2 * work.moved[direction]
        )

    def price_attention(self, tp: int, cp: int, samples: int, layer: int) -> tuple[Cost, Cost]:
        """Return the costs (forward, backward) of the mixer of one microbatch, with its norm, tp's and cp's messages.

        Adapters are included, recomputation is not.

        Args:
            samples: samples of the microbatch on one data rank.
            layer: index of the block; of equal blocks the first, so that their price is cached once.
        """
        model, mixer, seq = self.model, self.mixers[layer], self.config.training.seq_len
        X = samples * seq / cp
        T = X / tp
        work = mixer.work(model, tp)
        products = sum(self.product(T if p.own_tokens else X, p.outputs, p.inputs) for p in work.products)
        flops = mixer.flops(model, layer, seq) / tp * X
        narrow = min(1.0, 2 / (1 + WIDE / max(model.head_dim, NARROW)))
        ring = cp > 1 and self.config.parallelism.cp_kind == "ring" and not work.state
        core = flops / (self._attention_rate(cp, ring) * narrow)
        tp_group = LinkGroup(tp, 1)
        tp_time = sum(self.links.gather(tp_group, X * sent * self.w) for sent in (work.gathered, model.dim))
        group, host = LinkGroup(cp, tp), self.factors.block / 9
        parts = []
        backward = self.backward[layer]
        adapted = self.price_adapters(self.adapters[layer], "attention.", X, tp)
        for direction, factor in enumerate((1.0, BACKWARD)):
            memory = self.price_norms(T * model.dim, direction) + self.move_seconds(
                X * self._mixer_bytes(work, direction)
            )
            attention = core * (1.0, ATTENTION_BACKWARD * backward.scores / BACKWARD)[direction]
            times = (1.0, min(backward.products, self.most))[direction]
            cost = Cost(products * times, attention, memory, host * factor, tp_time)
            if ring:
                cost = cost + self._ring(group, X * work.queries, X * work.keys, attention, direction)
            elif cp > 1:
                cost = cost._replace(cp=self._context(group, X, samples, work) * factor)
            parts.append(cost + adapted[direction])
        return parts[0], parts[1]

    def _attention_rate(self, cp: int, ring: bool) -> float:
        """Return the FLOPs per second of attention's kernels, on average over a ring's shards if `ring`.

        A ring is slower than one kernel by `_ring_slowdown`; where FlashAttention-2 computes it, RING_RATE at most.
        """
        rate = self.peak * self.device.attention * self.factors.attention
        if not (ring and self.stack.merges_ring):
            return rate
        options, widths = self.config.parallelism, head_widths(self.model)
        # By itself the ring takes cuDNN's kernel too, where that knows the widths (titanmoe.parallel.attention_kernel).
        if options.attention_kernel == "fa2" or kernel_refuses("cudnn", *widths, self.config.training.deterministic):
            rate = min(rate, RING_RATE)
        return rate / _ring_slowdown(self.config.training.seq_len, cp)

    def _context(self, group: LinkGroup, X: float, samples: int, work: MixerWork) -> float:
        """Return the seconds of cp's messages in forward: of ulysses, allgather, or the states of linear attention.

        Backward's take twice as long, which the caller counts.

        Args:
            X: positions of a rank's attention slice, of all samples of the microbatch together.
        """
        query, keys, options = work.queries, work.keys, self.config.parallelism
        if work.state:
            count = samples * sequence_chunks(group.size, options.cp_placement)
            return self.links.gather(group, count * work.state * max(self.w, 4))
        if options.cp_kind == "ulysses":
            return self.links.exchange(group, X * (query + keys) * self.w) + self.links.exchange(
                group, X * query * self.w
            )
        return self.links.gather(group, group.size * X * keys * self.w)

    def _ring(self, group: LinkGroup, query: float, keys: float, attention: float, direction: int) -> Cost:
        """Return the cost that ring attention over cp adds to attention's own: messages, copies and launches.

        Keys and values pass from rank to rank. In backward their gradients pass too, in float32 and one step further,
        to reach the rank that owns them. Messages hide behind the attention of other shards. Copies and launches are
        left out for stacks without `merges_ring`, whose merging is hidden.

        Args:
            query: elements of a rank's queries.
            keys: elements of a rank's keys and values.
            attention: seconds of attention's kernels in this direction.
            direction: 0 forward, 1 backward.
        """
        passes = group.size - 1
        message_seconds = passes * self.links.send_to_next(group, keys * self.w)
        if not self.stack.merges_ring:
            return Cost(cp=self.links.exposed(message_seconds * (1 + direction), attention * passes / group.size))
        if direction:
            message_seconds += group.size * self.links.send_to_next(group, keys * max(self.w, 4))
        element_bytes = sum(
            elements * (fixed + passes * per_pass)
            for elements, (fixed, per_pass) in zip((query, keys), RING[direction], strict=True)
        )
        fixed, per_pass = RING_KERNELS[direction]
        kernels = fixed + passes * per_pass
        return Cost(
            memory=self.move_seconds(element_bytes),
            host=self.factors.block * kernels / BLOCK_KERNELS,
            cp=self.links.exposed(message_seconds, attention * passes / group.size),
        )
