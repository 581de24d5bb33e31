"""Seconds of a block by component: what attention, and a feed-forward network or experts, compute, move and send.

All times are those of the slowest rank. `titanmoe.plan.price` adds blocks up to a step.

Shapes: T tokens a rank owns, X positions of its attention slice (T times tp), R routed tokens, D model.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

from titanmoe.config.blocks import has_experts, splits_router_product, window
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.attention_backend import head_widths, kernel_refuses
from titanmoe.fold.degrees import Fold, sequence_chunks
from titanmoe.models.count import training_flops
from titanmoe.models.families import mixers
from titanmoe.models.mixers.mixer_spec import MixerWork
from titanmoe.models.tensors import Tuning
from titanmoe.plan.cost import Cost
from titanmoe.plan.devices import Device
from titanmoe.plan.dispatch_costs import BLOCK_KERNELS, DispatchChoice, DispatchCosts
from titanmoe.plan.links import Factors, LinkGroup, Links
from titanmoe.plan.sizes import ADDED, KERNELS, Adapter, adapters_of
from titanmoe.plan.training_stacks import TITANMOE, Stack

BACKWARD = 2.0
"""FLOPs of matrix products in backward, relative to forward."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention in backward, relative to forward: it recomputes its scores (arXiv 2205.14135)."""
RING = (((16, 27), (4, 4)), ((26, 17), (44, 22)))
"""Bytes that torch's ring of context parallelism moves around its kernels to cut pieces and to merge their results, in
the same units, forward and backward: per element of queries, and of keys and values; once, and again for each piece
that comes around. Counted in rehearsals (tests/plan/test_price.py)."""
RING_KERNELS = (5, 13), (15, 10)
"""Kernels that the same rehearsals count, once and for each shard that comes around."""
RING_RATE = 0.35 * 989.5e12
"""FLOPs per second at most in the ring's pieces where FlashAttention-2 computes them, which reaches 35 % of an H100's
peak (arXiv 2407.08608, abstract), where attention in one piece is cuDNN's on Hopper (torch 2.13, sdp_utils.cpp)."""
SHORT_CAUSAL, SHORT = 900, 190
"""Attention in samples of n tokens takes 1 + SHORT_CAUSAL / n times as long per FLOP as in very long ones, or without a
causal mask 1 + SHORT / n: cuDNN's 627, 827, 977, 1072 and 1120 TFLOP/s at 1,024 to 16,384 tokens, and 979, 1069, 1113,
1147 and 1153 without (B200, heads of 64; github.com/Dao-AILab/flash-attention/pull/2605)."""
FULL = ("full", "full_except_dispatch")
"""Modes of recomputation that launch a block's forward again."""
WIDE, NARROW = 128, 64
"""Widths of heads: from the first on attention reaches its full rate; narrower ones take more exponentials for the same
FLOPs, and at the second reach two thirds of it (arXiv 2407.08608, figure 5). None narrower was looked at."""


class BackwardFactors(NamedTuple):
    """FLOPs of a block's backward, relative to those of its forward."""

    products: float = BACKWARD
    scores: float = BACKWARD
    ffn: float = BACKWARD


def _backward(config: Config) -> list[BackwardFactors]:
    """Return the factors of each block, and last of the head (as ffn)."""
    model, tuning = config.model, Tuning.of(config)
    if tuning.trains_all:
        return [BackwardFactors()] * (model.num_layers + model.mtp_depth + 1)
    blocks, ends = training_flops(model, config.training.seq_len, tuning)
    return [BackwardFactors(*(work.factor for work in block)) for block in blocks] + [BackwardFactors(ffn=ends.factor)]


def _slower_in_pieces(seq: int, cp: int) -> float:
    """Return how much longer attention takes in cp shards than in one.

    One shard is causal, over a rank's tokens, the others are not, and short ones are slower.
    """
    short = cp / seq
    return ((1 + SHORT_CAUSAL * short) + (cp - 1) * (1 + SHORT * short)) / cp / (1 + SHORT_CAUSAL / seq)


class BlockCosts(DispatchCosts):
    """Costs of blocks for one model and batch. What several mappings share is priced once."""

    def __init__(
        self, config: Config, device: Device, factors: Factors, imbalance: float = 1.0, stack: Stack = TITANMOE
    ):
        self.config, self.model, self.device, self.factors = config, config.model, device, factors
        self.imbalance, self.stack = imbalance, stack
        self.links = Links(device, factors)
        self.w = WIDTHS[config.training.mixed_precision_param]
        self.routed_token_bytes = config.model.dim * self.w
        self.peak = device.peak(config.training.mixed_precision_param)
        self.expert_peak = device.peak("fp8") if config.moe.expert_dtype == "fp8" else self.peak
        self.attention = cache(self._attention)
        self.head = cache(self._head)
        self.dense = cache(self._dense)
        self.experts = cache(self._experts)
        self.product, self.expert_products = cache(self._product), cache(self._expert_products)
        self.mixers = mixers(self.model)
        self.backward = _backward(config)
        alike = [(mixer, window(self.model, i), self.backward[i]) for i, mixer in enumerate(self.mixers)]
        self.first_alike = [alike.index(kind) for kind in alike]
        """For each block, the first one that mixes tokens in the same way and of which as much is trained."""
        self.adapters = [list(adapters_of(config, layer, self.w)) for layer in range(len(self.mixers))]
        keys = [(has_experts(self.model, i), backward.ffn) for i, backward in enumerate(self.backward[:-1])]
        self.most = 1.0 if config.lora.rank else BACKWARD
        """Most that backward's products count: adapters' own, which its factors count too, are priced apart."""
        self.ffn_adapters = dict(zip(keys, self.adapters, strict=True))
        self.kinds = Counter((has_experts(self.model, i), self.first_alike[i]) for i in range(self.model.num_layers))

    # ---- pieces of both

    def _product(self, m: float, n: float, k: float, peak: float = 0.0) -> float:
        """Return the seconds of one (m, k) by (k, n) product: by its FLOPs or its bytes, whichever take longer."""
        share = min(1.0, self.device.share(m, n, k) * self.factors.matrix)
        move_seconds = self.w * (m * n + n * k + m * k) / (self.device.bandwidth * self.factors.memory)
        return max(2 * m * n * k / ((peak or self.peak) * share), move_seconds)

    def _norms(self, elements: float, part: int) -> float:
        return self.move_seconds(elements * (self.stack.norm[part] + self.stack.residual[part]))

    def _activation(self, elements: float, part: int) -> float:
        return self.move_seconds(elements * self.stack.swiglu[part])

    def _row_copies(self, left: float, arrived: float, exchanged: bool, part: int) -> float:
        """Return the seconds to copy routed tokens before they are sent, and back."""
        regrouped = 2 * arrived * self.stack.regroup[part] * exchanged
        return self.move_seconds(((left + arrived) * self.stack.permute[part] + regrouped) * self.model.dim)

    def _adapted(
        self, adapters: list[Adapter], prefix: str, rows: float, split: int, groups: float = 1.0
    ) -> tuple[Cost, Cost]:
        """Return what adapters on matrices whose names begin with `prefix` add, forward and backward.

        Args:
            rows: rows of each of the groups.
            split: ranks of tp or etp.
        """
        forward = backward = Cost()
        for adapter in adapters:
            if not adapter.name.startswith(prefix):
                continue
            inputs = adapter.inputs / (split if adapter.inputs_split else 1)
            outputs = adapter.outputs / (split if adapter.outputs_split else 1)
            products = groups * (self.product(rows, adapter.rank, inputs) + self.product(rows, outputs, adapter.rank))
            costs = [
                Cost(
                    matrix=products * factor,
                    memory=self.move_seconds(groups * rows * width * ADDED),
                    host=self.factors.block * kernels / BLOCK_KERNELS,
                )
                for factor, width, kernels in zip((1.0, BACKWARD), (outputs, inputs), KERNELS, strict=True)
            ]
            forward, backward = forward + costs[0], backward + costs[1]
        return forward, backward

    def _mixer_bytes(self, work: MixerWork, part: int) -> float:
        """Return the bytes moved per position between a mixer's products: norms of heads, rotation, joins, others."""
        rotated = 4 * work.queries if self.stack.joins_latent_heads and self.model.kv_lora_rank else work.rotated
        return rotated * self.stack.rope[part] + work.normed * self.stack.norm[part] + 2 * work.moved[part]

    # ---- forward and backward of one microbatch

    def _attention(self, tp: int, cp: int, samples: int, layer: int) -> tuple[Cost, Cost]:
        """Return forward and backward of attention in a block that is the first of its kind of mixer."""
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
        adapted = self._adapted(self.adapters[layer], "attention.", X, tp)
        for part, factor in enumerate((1.0, BACKWARD)):
            memory = self._norms(T * model.dim, part) + self.move_seconds(X * self._mixer_bytes(work, part))
            attention = core * (1.0, ATTENTION_BACKWARD * backward.scores / BACKWARD)[part]
            cost = Cost(
                products * (1.0, min(backward.products, self.most))[part], attention, memory, host * factor, tp_time
            )
            if ring:
                cost = cost + self._ring(group, X * work.queries, X * work.keys, attention, part)
            elif cp > 1:
                cost = cost._replace(cp=self._context(group, X, samples, work) * factor)
            parts.append(cost + adapted[part])
        return parts[0], parts[1]

    def _attention_rate(self, cp: int, ring: bool) -> float:
        rate = self.peak * self.device.attention * self.factors.attention
        if not (ring and self.stack.merges_ring):
            return rate
        options, widths = self.config.parallelism, head_widths(self.model)
        # By itself the ring takes cuDNN's kernel too, where that knows the widths (titanmoe.parallel.attention_kernel).
        if options.attention_kernel == "fa2" or kernel_refuses("cudnn", *widths, self.config.training.deterministic):
            rate = min(rate, RING_RATE)
        return rate / _slower_in_pieces(self.config.training.seq_len, cp)

    def _context(self, group: LinkGroup, X: float, samples: int, work: MixerWork) -> float:
        """Return the seconds of the messages of ulysses or allgather, or of states of linear attention, in forward.

        Backward sends twice as much.
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

    def _ring(self, group: LinkGroup, query: float, keys: float, attention: float, part: int) -> Cost:
        """Return what the ring of context parallelism adds to attention.

        Keys and values pass from rank to rank, and in backward their gradients too, in float32 and once more, to come
        home. Messages hide behind the attention of other shards.

        Args:
            query: elements of a rank's queries.
            keys: elements of a rank's keys and values.
        """
        passes = group.size - 1
        message_seconds = passes * self.links.pass_on(group, keys * self.w)
        if not self.stack.merges_ring:
            return Cost(cp=self.links.exposed(message_seconds * (1 + part), attention * passes / group.size))
        if part:
            message_seconds += group.size * self.links.pass_on(group, keys * max(self.w, 4))
        element_bytes = sum(
            elements * (fixed + passes * per_piece)
            for elements, (fixed, per_piece) in zip((query, keys), RING[part], strict=True)
        )
        fixed, per_piece = RING_KERNELS[part]
        kernels = fixed + passes * per_piece
        return Cost(
            memory=self.move_seconds(element_bytes),
            host=self.factors.block * kernels / BLOCK_KERNELS,
            cp=self.links.exposed(message_seconds, attention * passes / group.size),
        )

    def _head(self, tp: int, cp: int, samples: int) -> Cost:
        """Return forward and backward of the head and the loss together."""
        X, D = samples * self.config.training.seq_len / cp, self.model.dim
        V = self.model.vocab_size / tp
        products = self.stack.head_products - BACKWARD + self.backward[-1].ffn
        return Cost(
            matrix=products * self.product(X, V, D),
            memory=self.move_seconds(X * V * 16),
            tp=2 * self.links.gather(LinkGroup(tp, 1), X * D * self.w),
        )

    def _dense(
        self, tp: int, cp: int, samples: int, hidden: int, backward: float, shared: bool = False
    ) -> tuple[Cost, Cost]:
        D, X = self.model.dim, samples * self.config.training.seq_len / cp
        products = self.product(X, 2 * hidden / tp, D) + self.product(X, D, hidden / tp)
        tp_time = 2 * self.links.gather(LinkGroup(tp, 1), X * D * self.w)
        adapted = self._adapted(self.ffn_adapters[shared, backward], "moe.shared." if shared else "ffn.", X, tp)
        costs = []
        for part, factor in enumerate((1.0, BACKWARD)):
            memory = self._norms(X / tp * D, part) + self._activation(X * hidden / tp, part)
            cost = Cost(
                products * (1.0, min(backward, self.most))[part], 0.0, memory, self.factors.block / 9 * factor, tp_time
            )
            costs.append(cost + adapted[part])
        return costs[0], costs[1]

    def _experts(
        self,
        share: int,
        samples: int,
        tp: int,
        ep: int,
        etp: int,
        choice: DispatchChoice,
        backward: float = BACKWARD,
        between: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[Cost, Cost]:
        """Return forward and backward of a MoE layer.

        Args:
            share: ranks that share a sample, tp x cp.
            tp: matters to the shared expert only.
            between: as for `seconds_in_parts`, forward and backward.
        """
        model, D = self.model, self.model.dim
        T = samples * self.config.training.seq_len / share
        R = T * model.top_k * etp * self.imbalance
        parts, exchanged = choice.parts, ep * etp > 1
        router = parts * self._router_product(T / parts)
        products = self.expert_products(R / parts, ep, etp)
        rows, groups = self._grouped_rows(R, model.num_experts / ep)
        adapted = self._adapted(self.ffn_adapters[True, backward], "moe.experts.", rows, etp, groups)
        costs = []
        shared_expert = None
        if model.shared_hidden:
            shared_expert = self._dense(tp, share // tp, samples, model.shared_hidden, backward, True)
        for part, factor in enumerate((1.0, BACKWARD)):
            memory = (
                self._norms(T * D, part)
                + self._activation(R * model.expert_hidden / etp, part)
                + self._row_copies(T * model.top_k, R, exchanged, part)
                + self._expert_biases(R, etp, part)
            )
            times = (1.0, min(backward, self.most))[part]
            host = parts * self.factors.block * 2 / 9 * factor
            cost = Cost((parts * products + router) * times, 0.0, memory, host) + adapted[part]
            if choice.halves:
                cost = cost + self.cost_of_halves(self.expert_weights(ep, etp), T, part, times)
            shared_cost = Cost() if shared_expert is None else shared_expert[part]
            covering = self.covering(shared_cost.matrix)
            messages = self.rows(choice, T * self.imbalance, ep, etp, products * times, covering, between[part])
            cost = cost._replace(rows=messages)
            costs.append(cost + shared_cost._replace(host=0.0, memory=shared_cost.memory / 2))
        return costs[0], costs[1]

    def _expert_biases(self, R: float, etp: int, part: int) -> float:
        """Return the seconds that experts' biases take in passes of their own."""
        hidden, output = (per_element[part] for per_element in self.stack.expert_linear_bias)
        elements = R * (self.model.expert_hidden / etp * hidden + self.model.dim * output)
        return self.move_seconds(elements) * self.model.expert_linear_bias

    def _router_product(self, T: float) -> float:
        """Return the seconds of the router's product in forward.

        It is in float32, or in 16 bits with as many columns as the weights' three parts have and their sum in float32
        (docs/benchmarks.md, "The roofline of a layer, counted").
        """
        E, D = self.model.num_experts, self.model.dim
        if not (self.stack.router_in_parts and splits_router_product(self.config)):
            return self.product(T, E, D) * 4
        return self.product(T, 3 * E, D) + self.move_seconds(T * E * 16 + E * D * 12)

    def _grouped_rows(self, R: float, local_experts: float) -> tuple[float, float]:
        """Return the rows and the number of the products that a grouped product is priced as.

        It fills the device with the rows of all its experts.
        """
        rows = (max(R / local_experts, min(R, 256.0)) * R) ** 0.5
        return rows, R / rows

    def _expert_products(self, R: float, ep: int, etp: int) -> float:
        """Seconds of a rank's products forward. Each expert has its own weights to read."""
        model, D, F = self.model, self.model.dim, self.model.expert_hidden / etp
        local_experts = model.num_experts / ep
        rows, groups = self._grouped_rows(R, local_experts)
        products = groups * (
            self.product(rows, F, D, self.expert_peak) * 2 + self.product(rows, D, F, self.expert_peak)
        )
        return max(products, local_experts * 3 * D * F * self.w / (self.device.bandwidth * self.factors.memory))

    def recomputed_experts(
        self, forward: Cost, mode: str, share: int, samples: int, tp: int, ep: int, etp: int, choice: DispatchChoice
    ) -> Cost:
        """Return what backward recomputes of the experts: all but the down product, a third of the products.

        Routed tokens are sent to the experts at most, not back.
        """
        parts = choice.parts if ep * etp > 1 else 1
        R = samples * self.config.training.seq_len / share * self.model.top_k * etp * self.imbalance
        down = parts * self.expert_products(R / parts, ep, etp) / 3
        rows = 0.0 if mode == "full_except_dispatch" else forward.rows / 2
        # Of the first half nothing hides, because attention of the second is not repeated here.
        if rows and choice.halves:
            T = R / self.model.top_k / etp
            rows = self.exchange(choice.dispatcher, T, ep, etp) / 4 * (1 + self.links.message_share)
        return forward._replace(matrix=forward.matrix - down, rows=rows)

    # ---- a block under recomputation

    def attention_and_ffn(
        self, fold: Fold, samples: int, layer: int, choice: DispatchChoice
    ) -> tuple[tuple[Cost, Cost], ...]:
        """Return forward and backward of attention, and of the feed-forward network or experts."""
        model = self.model
        if has_experts(model, layer) and choice.halves:
            return self._in_halves(fold, samples, layer, choice)
        attention = self.attention(fold.tp, fold.cp, samples, self.first_alike[layer])
        if has_experts(model, layer):
            degrees = fold.tp * fold.cp, samples, fold.tp, fold.ep, fold.etp
            return attention, self.experts(*degrees, choice, self.backward[layer].ffn)
        return attention, self.dense(fold.tp, fold.cp, samples, model.dense_hidden, self.backward[layer].ffn)

    def _in_halves(self, fold: Fold, samples: int, layer: int, choice: DispatchChoice) -> tuple[tuple[Cost, Cost], ...]:
        """Return `attention_and_ffn` of a block with experts in halves.

        While routed tokens of the first half are in flight, attention of the second is computed.
        """
        half = self.attention(fold.tp, fold.cp, samples / 2, self.first_alike[layer])
        between = tuple(cost.matrix + cost.attention + cost.memory for cost in half)
        degrees, backward = (fold.tp * fold.cp, samples, fold.tp, fold.ep, fold.etp), self.backward[layer]
        weights = sum(p.outputs * p.inputs for p in self.mixers[layer].work(self.model, fold.tp).products)
        attention = half[0].times(2), half[1].times(2) + self.cost_of_halves(weights, 0.0, 1, backward.products)
        return attention, self.experts(*degrees, choice, backward.ffn, between)

    def launches(self, fold: Fold, mode: str) -> float:
        """Return the seconds in which the host launches a block, forward and backward."""
        return (self.stack.host_tp if fold.tp > 1 else self.stack.host) * (4 / 3 if mode in FULL else 1.0)

    def block(self, fold: Fold, samples: int, layer: int, choice: DispatchChoice, mode: str) -> Cost:
        attention, ffn = self.attention_and_ffn(fold, samples, layer, choice)
        total = attention[0] + attention[1] + ffn[0] + ffn[1]
        if choice.hidden:
            hidden = min(choice.hidden * total.rows, total.matrix + total.attention)
            total = total._replace(rows=total.rows - hidden + self.links.exposed(hidden, hidden))
        recomputed = Cost() if mode == "moe" else attention[0]
        if mode in ("moe", "full", "full_except_dispatch") and has_experts(self.model, layer):
            degrees = fold.tp * fold.cp, samples, fold.tp, fold.ep, fold.etp
            return total + recomputed + self.recomputed_experts(ffn[0], mode, *degrees, choice)
        if mode in FULL:
            return total + recomputed + ffn[0]
        if mode == "selective":
            memory, products = self.stack.selective
            forward = attention[0] + ffn[0]
            return total + Cost(matrix=forward.matrix * products, memory=forward.memory * memory)
        return total
