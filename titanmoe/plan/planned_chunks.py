"""moe.overlap_chunks = -1: in how many chunks the planner would have a run's rows travel."""

from __future__ import annotations

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.devices import Device, read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.totals_by_mode import MODES, best_ways

USUAL = "h100"
"""The hardware file for which a run's chunks are planned, whatever GPUs it has: all ranks must take the same number."""


def planned_chunks(config: Config, world: int, device: Device | None = None) -> int:
    """For the config's own mapping. device: USUAL, if None."""
    if config.pipeline.overlap_pairs:  # which hides rows already
        return 1
    fold = derive(world, config.parallelism)
    costs = BlockCosts(config, device or read_device(USUAL), Factors())
    experts = fold.tp * fold.cp, config.training.local_batch_size, fold.tp, fold.ep, fold.etp
    way, _ = best_ways(costs, config.moe.dispatcher, *experts)[MODES.index(config.activation_checkpoint.mode)]
    return way.chunks
