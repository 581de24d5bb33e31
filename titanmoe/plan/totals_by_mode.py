"""Seconds of all blocks of a model for each mode of recomputation: terms that the search adds up into its bounds.

Called by titanmoe.plan.candidates. Each term depends on a few degrees only, so it is computed once for many mappings.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS, halves_violations
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.cost import Cost
from titanmoe.plan.dispatch_costs import DispatchChoice

RECOMPUTE_MODES = ("none", "selective", "moe", "full_except_dispatch", "full")
SecondsByMode = tuple[float, ...]
"""Seconds in the order of RECOMPUTE_MODES."""


def _add(
    costs: BlockCosts,
    totals: list[float],
    count: int,
    forward: Cost,
    backward: Cost,
    recomputed: dict[str, Cost] | None = None,
) -> list[float]:
    """Return `totals` with `count` equal layers added, for each mode of recomputation.

    Args:
        costs: costs of the blocks, for what recomputation adds.
        totals: seconds in the order of RECOMPUTE_MODES.
        count: number of equal layers.
        forward: cost of one layer's forward.
        backward: cost of one layer's backward without recomputation.
        recomputed: cost of recomputation by mode, where it is not that of attention and dense networks.
    """
    once = sum(forward) + sum(backward)
    more = [(recomputed or {}).get(mode) or costs.recomputed(forward, mode) for mode in RECOMPUTE_MODES]
    return [x + count * (once + cost.seconds) for x, cost in zip(totals, more, strict=True)]


class TotalsByMode:
    """Seconds of one microbatch's blocks under any mapping, cached by the degrees that each term depends on."""

    def __init__(self, config: Config, costs: BlockCosts):
        self.config, self.costs = config, costs
        self.non_experts, self.experts = cache(self._non_experts), cache(self._experts)
        self.expert_products, self.in_halves = cache(self._expert_products), cache(self._in_halves)
        self.moe_layers: Counter[float] = Counter()
        """Number of MoE layers for each ratio of their backward's FLOPs to those of forward."""
        for (experts, first), count in costs.kinds.items():
            if experts:
                self.moe_layers[costs.backward[first].ffn] += count

    def _non_experts(self, tp: int, cp: int, samples: int) -> SecondsByMode:
        """Return the seconds of the head and of all attention and dense networks for one microbatch, by mode."""
        costs = self.costs
        totals = [sum(costs.head(tp, cp, samples))] * len(RECOMPUTE_MODES)
        for (experts, first), count in costs.kinds.items():
            totals = _add(costs, totals, count, *costs.attention(tp, cp, samples, first))
            if not experts:
                dense = costs.dense(tp, cp, samples, costs.model.dense_hidden, costs.backward[first].ffn)
                totals = _add(costs, totals, count, *dense)
        return tuple(totals)

    def _experts(
        self, sample_ranks: int, samples: int, tp: int, ep: int, etp: int, choice: DispatchChoice
    ) -> tuple[SecondsByMode, float]:
        """Return the seconds of the MoE layers by mode of recomputation, and those of dispatch and combine among them.

        The latter are without recomputation.

        Args:
            sample_ranks: ranks that a sample is divided among, tp x cp.
            tp: matters to the shared expert only.
            choice: the dispatcher, and what overlaps with it.
        """
        totals, messages = [0.0] * len(RECOMPUTE_MODES), 0.0
        modes, batch = ("moe", *RECOMPUTE_MODES[3:]), (sample_ranks, samples)
        for factor, count in self.moe_layers.items():
            forward, backward = self.costs.experts(*batch, tp, ep, etp, choice, factor)
            recomputed = {mode: self.costs.recomputed_experts(forward, mode, *batch, ep, etp, choice) for mode in modes}
            totals = _add(self.costs, totals, count, forward, backward, recomputed)
            messages += count * sum(cost.dispatch for cost in (forward, backward))
        return tuple(totals), messages

    def _expert_products(self, sample_ranks: int, samples: int, ep: int, etp: int) -> float:
        """Return the seconds of the experts' products in all MoE layers for one microbatch, without recomputation.

        It is a lower bound of what these layers take on the rank with the busiest experts.

        Args:
            sample_ranks: ranks that a sample is divided among, tp x cp.
        """
        costs = self.costs
        tokens = samples * self.config.training.seq_len / sample_ranks
        once = costs.expert_products(tokens * costs.model.top_k * etp * costs.imbalance, ep, etp)
        return sum(count * once * (1 + min(factor, costs.most)) for factor, count in self.moe_layers.items())

    def _in_halves(self, tp: int, cp: int, samples: int, ep: int, etp: int, dispatcher: str) -> SecondsByMode:
        """Return the seconds of the head and of all blocks if MoE blocks split the microbatch into halves, by mode.

        They are infinite where halves are illegal, or where no routed token leaves its rank.

        Args:
            samples: samples of the whole microbatch.
        """
        costs = self.costs
        config = replace(self.config, training=replace(self.config.training, local_batch_size=samples))
        if ep * etp == 1 or any(halves_violations(config, DISPATCHERS.look_up(dispatcher))):
            return (inf,) * len(RECOMPUTE_MODES)
        fold = Fold(world=tp * cp, cp=cp, tp=tp, ep=ep, etp=etp)
        choice, head = DispatchChoice(dispatcher, halves=True), sum(costs.head(tp, cp, samples))
        examples = {(has_experts(costs.model, i), costs.first_alike[i]): i for i in range(costs.model.num_layers)}
        return tuple(
            head
            + sum(n * costs.block(fold, samples, examples[k], choice, mode).seconds for k, n in costs.kinds.items())
            for mode in RECOMPUTE_MODES
        )
