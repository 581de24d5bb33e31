"""Choose `moe.overlap = "auto"`: what a run computes while routed tokens are in flight, by the planner."""

from __future__ import annotations

from dataclasses import replace

from titanmoe.config.laws import contradictions
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.legality import violations
from titanmoe.plan.devices import Device
from titanmoe.plan.dispatch_costs import NEAR
from titanmoe.plan.links import Factors
from titanmoe.plan.price import Pricer

TEXTS = {"none": "", "halves": "in two halves", "pairs": "in pairs"}
ON_CPUS = 'none, because moe.overlap = "auto" plans for GPUs alone'


def with_overlap(config: Config, overlap: str) -> Config:
    return replace(config, moe=replace(config.moe, overlap=overlap))


def planned_overlap(config: Config, world: int, device: Device) -> tuple[Config, str]:
    """Return the config with the fastest moe.overlap, and a text that says what was chosen and why.

    If the recipe does not say "auto" these are the config itself and "". Every rank must get the same answer, so it
    depends on nothing else.

    Args:
        config: with a global batch size.
        world: the ranks of the run.
        device: the GPU of all of them.
    """
    if config.moe.overlap != "auto":
        return config, ""
    none = with_overlap(config, "none")
    if device.name == "cpu":
        return none, ON_CPUS
    fold, pricer = derive(world, config.parallelism), Pricer(none, device, Factors())
    best, least = "none", (before := pricer.price(none, fold).step)
    for overlap in ("pairs", "halves"):
        changed = with_overlap(config, overlap)
        if contradictions(changed) or violations(changed, world):
            continue
        if NEAR * (seconds := pricer.price(changed, fold).step) < least:
            best, least = overlap, seconds
    reason = f"{least:.3g} s a step with that on {device.name} and {before:.3g} s without"
    if best == "none":
        reason = f"nothing that saves {NEAR - 1:.0%} of {before:.3g} s a step on {device.name}"
    return with_overlap(config, best), f'{best}, because moe.overlap = "auto" and the planner finds {reason}'


def overlap_text(config: Config) -> str:
    """Return how routed tokens travel while something else is computed; "" if that is the shared expert alone."""
    return TEXTS.get(config.moe.overlap, "")
