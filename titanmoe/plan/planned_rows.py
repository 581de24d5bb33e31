"""moe.overlap_chunks = -1: how the planner would have a run's rows travel under the run's own mapping."""

from __future__ import annotations

from dataclasses import replace

from titanmoe.config.laws import contradictions
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.legality import violations
from titanmoe.plan.devices import Device
from titanmoe.plan.links import Factors
from titanmoe.plan.price import Pricer
from titanmoe.plan.rows_on_their_way import CHUNKS, NEAR


def planned_rows(config: Config, world: int, device: Device) -> tuple[Config, str]:
    """The config with that filled in, and what was chosen and why; "" if rows travel whole or as the recipe says.

    config: with a global batch size. Every rank must get the same answer, so it depends on nothing else.
    """
    moe, pipeline = config.moe, config.pipeline
    if moe.overlap_chunks != -1:
        return config, ""
    fold, whole = derive(world, config.parallelism), replace(config, moe=replace(moe, overlap_chunks=1))
    if device.name == "cpu" or moe.overlap_halves or pipeline.overlap_pairs:
        return whole, ""
    chunks = [replace(config, moe=replace(moe, overlap_chunks=n)) for n in CHUNKS[1:]]
    pairs = replace(whole, pipeline=replace(pipeline, overlap_pairs=True))
    halves = replace(whole, moe=replace(whole.moe, overlap_halves=True))
    pricer = Pricer(whole, device, Factors())
    best, least = whole, (before := pricer.price(whole, fold).step)
    for way in (*chunks, pairs, halves):
        if contradictions(way) or violations(way, world):
            continue
        if NEAR * (seconds := pricer.price(way, fold).step) < least:
            best, least = way, seconds
    gain = f"{least:.3g} s a step with that on {device.name} and {before:.3g} s without"
    why = f"{rows_text(best)}, because the planner finds {gain}; moe.overlap_chunks = 1 turns it off"
    return best, "" if best is whole else why


def rows_text(config: Config) -> str:
    """How they travel; "" if whole."""
    moe, pairs = config.moe, config.pipeline.overlap_pairs
    ways = {f"in {moe.chunks} chunks": moe.chunks > 1, "in two halves": moe.overlap_halves, "in pairs": pairs}
    return " and ".join(text for text, so in ways.items() if so)
