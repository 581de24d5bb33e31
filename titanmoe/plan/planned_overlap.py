"""Choose `moe.overlap = "auto"`: what a run computes while routed tokens are in flight, by the planner.

Called by titanmoe.rank before a run is built, by rehearsals and by plans. Each overlap is priced under the mapping; one
that gains less than 2 % is not chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titanmoe.config.laws import contradictions
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.fold.legality import violations
from titanmoe.plan.devices import Device, choose_device, read_device
from titanmoe.plan.dispatch_costs import NEAR
from titanmoe.plan.links import Factors
from titanmoe.plan.price import Pricer

if TYPE_CHECKING:
    from titanmoe.train.runtime import Runtime

TEXTS = {"none": "", "halves": "in two halves", "pairs": "in pairs"}
ON_CPUS = 'none, because moe.overlap = "auto" plans for GPUs alone'


def with_overlap(config: Config, overlap: str) -> Config:
    return replace(config, moe=replace(config.moe, overlap=overlap))  # type: ignore[arg-type]


def planned_overlap(config: Config, world: int, device: Device) -> tuple[Config, str]:
    """Return the config with the fastest moe.overlap ("none", "halves" or "pairs") for "auto", and the reason as text.

    If the recipe does not say "auto", return the config unchanged and "". Overlaps that are illegal under the mapping
    are left out; whether their memory fits is not checked. All ranks get the same result without communication, because
    it depends on the arguments alone.

    Args:
        config: recipe with a global batch size.
        device: the GPU of all ranks, or "cpu", for which the choice is "none".
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


def plan_overlap_of_run(config: Config, runtime: Runtime) -> tuple[Config, str]:
    """Return the config with a run's moe.overlap for "auto", and the reason as text.

    `config` has a global batch size. On CPUs it is "none". On GPUs collective over the world: all ranks plan for rank
    0's device, so that all make the same choice.
    """
    import torch  # not by a plan, which needs none
    import torch.distributed as dist

    if runtime.device.type != "cuda":
        return planned_overlap(config, runtime.world, read_device("cpu"))
    gpu = [torch.cuda.get_device_name(runtime.device)]
    dist.broadcast_object_list(gpu)
    return planned_overlap(config, runtime.world, choose_device(gpu[0]))


def overlap_text(config: Config) -> str:
    """Return the words for moe.overlap in a sentence, such as "in two halves"; "" for "none"."""
    return TEXTS.get(config.moe.overlap, "")
