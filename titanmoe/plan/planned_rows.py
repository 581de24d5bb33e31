"""moe.overlap_chunks = -1: how the planner would have a run's rows travel: in chunks, or in two halves."""

from __future__ import annotations

from dataclasses import replace

from titanmoe.config.schema import Config, MoE
from titanmoe.fold.degrees import derive
from titanmoe.plan.block_costs import BlockCosts
from titanmoe.plan.devices import Device, read_device
from titanmoe.plan.links import Factors
from titanmoe.plan.rows_on_their_way import NEAR
from titanmoe.plan.totals_by_mode import MODES, best_ways, non_expert_seconds, seconds_in_halves

USUAL = "h100"
"""The hardware file for which a run's rows are planned, whatever GPUs it has: all ranks must do the same."""


def planned_rows(config: Config, world: int, device: Device | None = None) -> MoE:
    """[moe] for the config's own mapping. device: USUAL, if None."""
    moe = replace(config.moe, overlap_chunks=1)
    if config.pipeline.overlap_pairs or moe.overlap_halves:  # which hide rows already
        return moe
    fold, mode = derive(world, config.parallelism), MODES.index(config.activation_checkpoint.mode)
    costs = BlockCosts(config, device or read_device(USUAL), Factors())
    attention = fold.tp, fold.cp, config.training.local_batch_size
    experts = fold.tp * fold.cp, config.training.local_batch_size, fold.tp, fold.ep, fold.etp
    way, seconds = best_ways(costs, moe.dispatcher, *experts)[mode]
    whole = non_expert_seconds(costs, *attention)[mode] + seconds
    if NEAR * seconds_in_halves(config, costs, moe.dispatcher, fold)[mode] < whole:
        return replace(moe, overlap_halves=True)
    return replace(moe, overlap_chunks=way.chunks)
