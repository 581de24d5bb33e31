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
    ways = {"": whole} | {f"in {n} chunks": replace(config, moe=replace(moe, overlap_chunks=n)) for n in CHUNKS[1:]}
    ways["in pairs"] = replace(whole, pipeline=replace(pipeline, overlap_pairs=True))
    ways["in two halves"] = replace(whole, moe=replace(whole.moe, overlap_halves=True))
    pricer = Pricer(whole, device, Factors())
    seconds = {
        words: pricer.price(way, fold).step
        for words, way in ways.items()
        if way is whole or not (contradictions(way) or violations(way, world))
    }
    best = ""
    for words, time in seconds.items():
        if NEAR * time < seconds[best]:
            best = words
    if not best:
        return whole, ""
    gain = f"{seconds[best]:.3g} s a step with that on {device.name} and {seconds['']:.3g} s without"
    return ways[best], f"{best}, because the planner finds {gain}; moe.overlap_chunks = 1 turns it off"
