"""Which expert weights FSDP does not shard, and whether gathered weights stay. Imports no torch, for the planner.

Called by titanmoe.parallel, which acts on it, by the laws of mappings and by the planner. With edp = 1 no two data
ranks share an expert, so FSDP would have nothing to gather.
"""

from __future__ import annotations

from collections.abc import Iterator

from titanmoe.config.blocks import moe_layers
from titanmoe.config.schema import Config, Parallelism, Training


def reshards_after_forward(options: Parallelism) -> bool:
    """Return whether FSDP frees gathered weights between forward and backward; under "auto" if there is no pipeline."""
    choice = options.reshard_after_forward
    return options.pp == 1 if choice == "auto" else choice == "always"


def experts_are_unsharded(options: Parallelism, training: Training, edp: int) -> bool:
    """Return whether experts stay outside FSDP, because edp = 1 leaves nothing to gather.

    Copies of these weights in the compute dtype, if it is not the stored one, exist from the step's first forward to
    its last backward. If they are needed and reshard_after_forward is "always", the experts are left to FSDP, which
    copies one layer at a time.
    """
    return edp == 1 and not (has_compute_copies(training) and options.reshard_after_forward == "always")


def has_compute_copies(training: Training) -> bool:
    """Return whether weights are computed with in another dtype than they are stored in, so that copies are needed."""
    return training.dtype != training.mixed_precision_param


def accumulation_violations(config: Config, edp: int) -> Iterator[str]:
    """Yield a message if moe.accumulate_weight_gradients is set in vain: no layer has experts, or FSDP has them."""
    if not config.moe.accumulate_weight_gradients:
        return
    wrong, fix = "", "set it to false"
    if not moe_layers(config.model):
        wrong = "no layer has experts"
    elif edp > 1:
        wrong, fix = f"{edp} data ranks shard the same experts (edp = {edp})", f"{fix}, or use a mapping with edp = 1"
    elif not experts_are_unsharded(config.parallelism, config.training, edp):
        wrong = 'parallelism.reshard_after_forward = "always" leaves the experts to FSDP'
        fix += ', or use "auto"'
    if wrong:
        yield f"moe.accumulate_weight_gradients = true has no effect, because {wrong}: {fix}"
