"""Seconds of all blocks of a model for each mode of recomputation: terms that the search adds up into its bounds."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS, halves_violations
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.cost import Cost
from titanmoe.plan.dispatch_costs import DispatchChoice

MODES = ("none", "selective", "moe", "full_except_dispatch", "full")
SecondsByMode = tuple[float, ...]
"""Seconds in the order of MODES."""


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
        totals: seconds in the order of MODES.
        forward: cost of one layer's forward.
        backward: cost of one layer's backward without recomputation.
        recomputed: cost of recomputation by mode; by default both full modes repeat the forward.
    """
    once = sum(forward) + sum(backward)
    recomputed = recomputed or {"full": forward, "full_except_dispatch": forward}
    memory, products = costs.stack.selective
    recompute = {mode: sum(cost) for mode, cost in recomputed.items()}
    recompute["selective"] = forward.memory * memory + forward.matrix * products
    return [x + count * (once + recompute.get(mode, 0.0)) for x, mode in zip(totals, MODES, strict=True)]


def non_expert_seconds(costs: BlockCosts, tp: int, cp: int, samples: int) -> SecondsByMode:
    """Return the seconds of one microbatch's head, attention and dense networks, by mode of recomputation.

    They do not depend on the mapping of the experts.
    """
    totals = [sum(costs.head(tp, cp, samples))] * len(MODES)
    for (experts, first), count in costs.kinds.items():
        totals = _add(costs, totals, count, *costs.attention(tp, cp, samples, first))
        if not experts:
            dense = costs.dense(tp, cp, samples, costs.model.dense_hidden, costs.backward[first].ffn)
            totals = _add(costs, totals, count, *dense)
    return tuple(totals)


def expert_seconds(
    costs: BlockCosts, sample_ranks: int, samples: int, tp: int, ep: int, etp: int, choice: DispatchChoice
) -> SecondsByMode:
    """Return the seconds of one microbatch's MoE layers, by mode of recomputation.

    Args:
        sample_ranks: ranks that a sample is divided among, tp x cp.
        samples: samples of the microbatch.
        choice: the dispatcher, and what overlaps with it.
    """
    totals, degrees = [0.0] * len(MODES), (sample_ranks, samples, tp, ep, etp)
    for factor, count in _moe_layers(costs).items():
        forward, backward = costs.experts(*degrees, choice, factor)
        modes = ("moe", *MODES[3:])
        recomputed = {mode: costs.recomputed_experts(forward, mode, *degrees, choice) for mode in modes}
        totals = _add(costs, totals, count, forward, backward, recomputed)
    return tuple(totals)


def routed_message_seconds(costs: BlockCosts, *experts: Any) -> float:
    """Return the seconds of dispatch and combine in one microbatch, without recomputation.

    Args:
        costs: prices of the model's blocks.
        experts: further arguments of `expert_seconds`.
    """
    return sum(
        count * sum(cost.rows for cost in costs.experts(*experts, factor))
        for factor, count in _moe_layers(costs).items()
    )


def _moe_layers(costs: BlockCosts) -> dict[float, int]:
    """Return the number of MoE layers for each ratio of their backward's FLOPs to those of forward."""
    counts: Counter[float] = Counter()
    for (experts, first), count in costs.kinds.items():
        if experts:
            counts[costs.backward[first].ffn] += count
    return counts


def seconds_in_halves(config: Config, costs: BlockCosts, dispatcher: str, fold: Fold) -> SecondsByMode:
    """Return the seconds of a microbatch whose blocks split it into halves, by mode of recomputation.

    They are infinite where halves are illegal, or where no routed token leaves its rank.

    Args:
        config: the config that `costs` was made with; its microbatch may differ.
        costs: prices of the model's blocks.
        dispatcher: name of the dispatcher.
        fold: the degrees.
    """
    if fold.ep * fold.etp == 1 or any(halves_violations(config, DISPATCHERS.look_up(dispatcher))):
        return (inf,) * len(MODES)
    samples = config.training.local_batch_size
    choice, head = DispatchChoice(dispatcher, halves=True), sum(costs.head(fold.tp, fold.cp, samples))
    examples = {(has_experts(costs.model, i), costs.first_alike[i]): i for i in range(costs.model.num_layers)}
    return tuple(
        head
        + sum(n * costs.block(fold, samples, examples[kind], choice, mode).seconds for kind, n in costs.kinds.items())
        for mode in MODES
    )
