"""Seconds of a block by component: what attention, and a feed-forward network or experts, compute, move and send.

All times are those of the slowest rank. `titanmoe.plan.price` adds blocks up to a step.

Shapes: T tokens a rank owns, X positions of its attention slice (T times tp), R routed tokens, D model, E experts,
F hidden width of an expert on a rank, V ids of a rank's shard of the head.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from titanmoe.config.blocks import has_experts, splits_router_product, window
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.models.count import training_flops
from titanmoe.models.families import mixers
from titanmoe.models.tensors import Tuning
from titanmoe.plan.attention_costs import BACKWARD, AttentionCosts, BackwardFactors
from titanmoe.plan.cost import Cost
from titanmoe.plan.devices import Device
from titanmoe.plan.dispatch_costs import DispatchChoice
from titanmoe.plan.links import Factors, LinkGroup, Links
from titanmoe.plan.sizes import adapters_of
from titanmoe.plan.training_stacks import TITANMOE, Stack

FULL = ("full", "full_except_dispatch")
"""Modes of recomputation that launch a block's forward again."""


def _backward(config: Config) -> list[BackwardFactors]:
    """Return the backward factors of each block, and as the last entry those of the head, whose `ffn` alone is used."""
    model, tuning = config.model, Tuning.of(config)
    if tuning.trains_all:
        return [BackwardFactors()] * (model.num_layers + model.mtp_depth + 1)
    blocks, ends = training_flops(model, config.training.seq_len, tuning)
    return [BackwardFactors(*(work.factor for work in block)) for block in blocks] + [BackwardFactors(ffn=ends.factor)]


class BlockCosts(AttentionCosts):
    """Forward and backward costs of a block for one model and batch, under any mapping.

    Costs that several mappings share are cached: `attention` and `product` are `price_attention` and `price_product`;
    `dense`, `experts`, `expert_products` and `head` are the private methods of those names.
    """

    def __init__(
        self, config: Config, device: Device, factors: Factors, imbalance: float = 1.0, stack: Stack = TITANMOE
    ):
        self.config, self.model, self.device, self.factors = config, config.model, device, factors
        self.imbalance, self.stack = imbalance, stack
        self.links = Links(device, factors)
        self.w = WIDTHS[config.training.mixed_precision_param]
        self.reduced_width = max(self.w, WIDTHS[config.training.mixed_precision_reduce])
        """Bytes of a gradient while it is summed over ranks and microbatches."""
        self.routed_token_bytes = config.model.dim * self.w
        self.peak = device.peak(config.training.mixed_precision_param)
        self.expert_peak = device.peak("fp8") if config.moe.expert_dtype == "fp8" else self.peak
        self.attention = cache(self.price_attention)
        self.head = cache(self._head)
        self.dense = cache(self._dense)
        self.experts = cache(self._experts)
        self.product, self.expert_products = cache(self.price_product), cache(self._expert_products)
        self.mixers = mixers(self.model)
        self.backward = _backward(config)
        alike = [(mixer, window(self.model, i), self.backward[i]) for i, mixer in enumerate(self.mixers)]
        self.first_alike = [alike.index(kind) for kind in alike]
        """Index, for each block, of the first one that has its mixer and window and of which as much is trained."""
        self.adapters = [list(adapters_of(config, layer, self.w)) for layer in range(len(self.mixers))]
        keys = [(has_experts(self.model, i), backward.ffn) for i, backward in enumerate(self.backward[:-1])]
        self.most = 1.0 if config.lora.rank else BACKWARD
        """Most that backward's products count: adapters' own, which its factors count too, are priced apart."""
        self.ffn_adapters = dict(zip(keys, self.adapters, strict=True))
        self.kinds = Counter((has_experts(self.model, i), self.first_alike[i]) for i in range(self.model.num_layers))

    def _activation(self, elements: float, direction: int) -> float:
        return self.move_seconds(elements * self.stack.swiglu[direction])

    def _routed_copies(self, left: float, arrived: float, exchanged: bool, direction: int) -> float:
        """Return the seconds of the copies that reorder routed tokens around dispatch and combine, without messages.

        Args:
            left: routed tokens of the rank's own tokens, before dispatch.
            arrived: routed tokens of the rank's experts, permuted as `left` are, with or without an all-to-all.
            exchanged: whether there is an all-to-all, after which `arrived` are also regrouped by expert, and back.
            direction: 0 forward, 1 backward.
        """
        regrouped = 2 * arrived * self.stack.regroup[direction] * exchanged
        return self.move_seconds(((left + arrived) * self.stack.permute[direction] + regrouped) * self.model.dim)

    # ---- forward and backward of one microbatch

    def _head(self, tp: int, cp: int, samples: int, stages: int = 1) -> Cost:
        """Return the cost of the head and the loss for one microbatch, forward and backward added up.

        Multi-token prediction, which uses the head a second time, is not included.

        Args:
            stages: pipeline ranks that share the head. What they send each other is not included.
        """
        X, D = samples * self.config.training.seq_len / cp, self.model.dim
        V = self.model.vocab_size / (tp * stages)
        products = self.stack.head_products - BACKWARD + self.backward[-1].ffn
        return Cost(
            matrix=products * self.product(X, V, D),
            memory=self.move_seconds(X * V * 16),
            tp=2 * self.links.gather(LinkGroup(tp, 1), X * D * self.w),
        )

    def _dense(
        self, tp: int, cp: int, samples: int, hidden: int, backward: float, *, shared: bool = False
    ) -> tuple[Cost, Cost]:
        """Return the costs (forward, backward) of a dense or shared feed-forward network for one microbatch.

        A norm (for a shared expert too), tp's messages and its adapters are included.

        Args:
            hidden: width of the network, before tp divides it.
            backward: FLOPs of backward relative to forward.
            shared: whether it is the shared expert of a MoE layer, which selects its adapters alone.
        """
        D, X = self.model.dim, samples * self.config.training.seq_len / cp
        products = self.product(X, 2 * hidden / tp, D) + self.product(X, D, hidden / tp)
        tp_time = 2 * self.links.gather(LinkGroup(tp, 1), X * D * self.w)
        adapted = self.price_adapters(self.ffn_adapters[shared, backward], "moe.shared." if shared else "ffn.", X, tp)
        costs = []
        for direction, factor in enumerate((1.0, BACKWARD)):
            memory = self.price_norms(X / tp * D, direction) + self._activation(X * hidden / tp, direction)
            times = (1.0, min(backward, self.most))[direction]
            cost = Cost(products * times, 0.0, memory, self.factors.block / 9 * factor, tp_time)
            costs.append(cost + adapted[direction])
        return costs[0], costs[1]

    def _experts(
        self,
        sample_ranks: int,
        samples: int,
        tp: int,
        ep: int,
        etp: int,
        choice: DispatchChoice,
        backward: float = BACKWARD,
        between: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[Cost, Cost]:
        """Return the costs (forward, backward) of a MoE layer for one microbatch.

        Norm, router, dispatch and combine, adapters and the shared expert are included; of the shared expert neither
        launches nor half of the memory-bound work. Messages are what computation does not hide.

        Args:
            sample_ranks: ranks that a sample is divided among, tp x cp.
            tp: matters to the shared expert only.
            choice: the dispatcher, and what overlaps with it.
            backward: FLOPs of the experts' backward relative to forward.
            between: seconds (forward, backward) that are computed before the second half can be sent.
        """
        model, D = self.model, self.model.dim
        T = samples * self.config.training.seq_len / sample_ranks
        R = T * model.top_k * etp * self.imbalance
        chunks, exchanged = choice.chunks, ep * etp > 1
        router = chunks * self._router_product(T / chunks)
        products = self.expert_products(R / chunks, ep, etp)
        tokens, groups = self._equal_products(R, model.num_experts / ep)
        adapted = self.price_adapters(self.ffn_adapters[True, backward], "moe.experts.", tokens, etp, groups)
        costs = []
        shared_expert = None
        if model.shared_hidden:
            shared_expert = self._dense(tp, sample_ranks // tp, samples, model.shared_hidden, backward, shared=True)
        for direction, factor in enumerate((1.0, BACKWARD)):
            memory = (
                self.price_norms(T * D, direction)
                + self._activation(R * model.expert_hidden / etp, direction)
                + self._routed_copies(T * model.top_k, R, exchanged, direction)
                + self._expert_biases(R, etp, direction)
            )
            times = (1.0, min(backward, self.most))[direction]
            host = chunks * self.factors.block * 2 / 9 * factor
            cost = Cost((chunks * products + router) * times, 0.0, memory, host) + adapted[direction]
            if choice.halves:
                weights = 3 * model.num_experts / ep * D * model.expert_hidden / etp  # before edp shards them
                cost = cost + self.cost_of_halves(weights, T, direction, times)
            shared_cost = Cost() if shared_expert is None else shared_expert[direction]
            messages = self.routed_message_seconds(
                choice,
                T * self.imbalance,
                ep=ep,
                etp=etp,
                products=products * times,
                shared_seconds=shared_cost.matrix * self.stack.hides_behind_shared,
                between=between[direction],
            )
            cost = cost._replace(dispatch=messages)
            costs.append(cost + shared_cost._replace(host=0.0, memory=shared_cost.memory / 2))
        return costs[0], costs[1]

    def _expert_biases(self, R: float, etp: int, direction: int) -> float:
        """Return the seconds to add the experts' biases, or their gradients, for R routed tokens; 0 if there are none.

        Args:
            direction: 0 forward, 1 backward.
        """
        hidden, output = (per_element[direction] for per_element in self.stack.expert_linear_bias)
        elements = R * (self.model.expert_hidden / etp * hidden + self.model.dim * output)
        return self.move_seconds(elements) * self.model.expert_linear_bias

    def _router_product(self, T: float) -> float:
        """Return the seconds of the router's product of T tokens in forward.

        It is in float32, four times as long as in 16 bits; or if recipe and stack do so in 16 bits with the weight
        split into three addends, which makes three times the columns, and their sum in float32 (docs/benchmarks.md,
        "The roofline of a layer, counted").
        """
        E, D = self.model.num_experts, self.model.dim
        if not (self.stack.router_in_parts and splits_router_product(self.config)):
            return self.product(T, E, D) * 4
        return self.product(T, 3 * E, D) + self.move_seconds(T * E * 16 + E * D * 12)

    def _equal_products(self, R: float, local_experts: float) -> tuple[float, float]:
        """Return (tokens, number) of the equal matrix products as which the experts' grouped product is priced.

        One product for each expert would be too slow a price, because the kernels of all experts fill the device
        together. So the tokens of a product are the geometric mean of R and an expert's R / local_experts, the latter
        at least 256 if R is.

        Args:
            R: routed tokens of the rank.
            local_experts: experts of the rank.
        """
        tokens = (max(R / local_experts, min(R, 256.0)) * R) ** 0.5
        return tokens, R / tokens

    def _expert_products(self, R: float, ep: int, etp: int) -> float:
        """Return the seconds of the forward products of a rank's experts in one MoE layer, for its R routed tokens.

        It is at least the time to read each expert's weights.
        """
        model, D, F = self.model, self.model.dim, self.model.expert_hidden / etp
        local_experts = model.num_experts / ep
        tokens, groups = self._equal_products(R, local_experts)
        products = groups * (
            self.product(tokens, F, D, self.expert_peak) * 2 + self.product(tokens, D, F, self.expert_peak)
        )
        return max(products, local_experts * 3 * D * F * self.w / (self.device.bandwidth * self.factors.memory))

    def recomputed(self, forward: Cost, mode: str) -> Cost:
        """Return the cost that recomputing adds to the backward of attention or a feed-forward layer.

        Args:
            forward: cost of the layer's forward.
            mode: "selective" adds the stack's fractions of its products and memory-bound work, "moe" and "none"
                nothing, others all of it.
        """
        if mode in FULL:
            return forward
        memory, products = self.stack.selective if mode == "selective" else (0.0, 0.0)
        return Cost(matrix=forward.matrix * products, memory=forward.memory * memory)

    def recomputed_experts(
        self, forward: Cost, mode: str, sample_ranks: int, samples: int, ep: int, etp: int, choice: DispatchChoice
    ) -> Cost:
        """Return the cost that backward adds by recomputing a MoE layer: its forward without the down product.

        The down product is a third of the products. Routed tokens are dispatched a second time, unless the mode is
        "full_except_dispatch", but outputs are not combined.

        Args:
            forward: cost of the layer's forward.
            mode: mode of recomputation: "full", "full_except_dispatch" or "moe".
            sample_ranks: ranks that a sample is divided among, tp x cp.
            choice: the dispatcher, and what overlaps with it.
        """
        chunks = choice.chunks if ep * etp > 1 else 1
        R = samples * self.config.training.seq_len / sample_ranks * self.model.top_k * etp * self.imbalance
        down = chunks * self.expert_products(R / chunks, ep, etp) / 3
        dispatch = 0.0 if mode == "full_except_dispatch" else forward.dispatch / 2
        # Of the first half nothing hides, because attention of the second is not repeated here.
        if dispatch and choice.halves:
            T = R / self.model.top_k / etp
            dispatch = self.exchange(choice.dispatcher, T, ep, etp) / 4 * (1 + self.links.message_fraction)
        return forward._replace(matrix=forward.matrix - down, dispatch=dispatch)

    # ---- a block under recomputation

    def attention_and_ffn(
        self, fold: Fold, samples: int, layer: int, choice: DispatchChoice
    ) -> tuple[tuple[Cost, Cost], ...]:
        """Return the costs (forward, backward) of attention in block `layer`, and those of its dense or MoE layer.

        They are those of one microbatch.
        """
        model = self.model
        if has_experts(model, layer) and choice.halves:
            return self._in_halves(fold, samples, layer, choice)
        attention = self.attention(fold.tp, fold.cp, samples, self.first_alike[layer])
        if has_experts(model, layer):
            degrees = fold.tp * fold.cp, samples, fold.tp, fold.ep, fold.etp
            return attention, self.experts(*degrees, choice, self.backward[layer].ffn)
        return attention, self.dense(fold.tp, fold.cp, samples, model.dense_hidden, self.backward[layer].ffn)

    def _in_halves(self, fold: Fold, samples: int, layer: int, choice: DispatchChoice) -> tuple[tuple[Cost, Cost], ...]:
        """Return the costs (forward, backward) of attention, and those of the MoE layer, overlapping in halves.

        While routed tokens of the first half are in flight, attention of the second is computed. `samples` are those of
        both.
        """
        half = self.attention(fold.tp, fold.cp, samples / 2, self.first_alike[layer])
        between = tuple(cost.matrix + cost.attention + cost.memory for cost in half)
        degrees, backward = (fold.tp * fold.cp, samples, fold.tp, fold.ep, fold.etp), self.backward[layer]
        weights = sum(p.outputs * p.inputs for p in self.mixers[layer].work(self.model, fold.tp).products)
        attention = half[0].times(2), half[1].times(2) + self.cost_of_halves(weights, 0.0, 1, backward.products)
        return attention, self.experts(*degrees, choice, backward.ffn, between)

    def launches(self, fold: Fold, mode: str) -> float:
        """Return the host's seconds to launch a block for one microbatch, forward and backward.

        `mode` is the block's mode of recomputation: those of FULL take a third more. Of `fold` only matters whether
        tp > 1.
        """
        return (self.stack.host_tp if fold.tp > 1 else self.stack.host) * (4 / 3 if mode in FULL else 1.0)

    def block(self, fold: Fold, samples: int, layer: int, choice: DispatchChoice, mode: str) -> Cost:
        """Return the cost of a block for one microbatch, forward and backward added up, recomputation included.

        Messages that pairs hide are taken off. What FSDP sends and copies is not included.

        Args:
            mode: mode of recomputation of this block: "none", "selective", "moe" (of a dense block "none"),
                "full_except_dispatch" or "full".
        """
        attention, ffn = self.attention_and_ffn(fold, samples, layer, choice)
        total = attention[0] + attention[1] + ffn[0] + ffn[1]
        if choice.hidden:
            hidden = min(choice.hidden * total.dispatch, total.matrix + total.attention)
            total = total._replace(dispatch=total.dispatch - hidden + self.links.exposed(hidden, hidden))
        if mode in (*FULL, "moe") and has_experts(self.model, layer):
            degrees = fold.tp * fold.cp, samples, fold.ep, fold.etp
            experts = self.recomputed_experts(ffn[0], mode, *degrees, choice)
            return total + self.recomputed(attention[0], mode) + experts
        return total + self.recomputed(attention[0] + ffn[0], mode)
