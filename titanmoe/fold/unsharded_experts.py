"""Which weights data ranks share, and whether the gathered ones stay. Without torch: the planner asks too."""

from __future__ import annotations

from collections.abc import Iterator

from titanmoe.config.blocks import moe_layers
from titanmoe.config.schema import Config, Parallelism, Training


def reshards_after_forward(options: Parallelism) -> bool:
    """Whether gathered weights are freed between forward and backward."""
    choice = options.reshard_after_forward
    return options.pp == 1 if choice == "auto" else choice == "always"


def experts_are_unsharded(options: Parallelism, training: Training, edp: int) -> bool:
    """Whether experts are in no FSDP unit, because no other data rank shares theirs and there is nothing to gather.

    Their copies live as long as the step's forward and backward, so "always" leaves them to FSDP, a layer at a time.
    """
    return edp == 1 and not (has_compute_copies(training) and options.reshard_after_forward == "always")


def has_compute_copies(training: Training) -> bool:
    """Whether weights that are trained are computed with in another dtype than the one they are stored in."""
    return training.dtype != training.mixed_precision_param


def accumulation_violations(config: Config, edp: int) -> Iterator[str]:
    """Why the experts' gradients cannot be added up inside their products."""
    if not config.moe.accumulate_weight_gradients:
        return
    wrong, fix = "", "set it to false"
    if not moe_layers(config.model):
        wrong = "no layer has experts"
    elif edp > 1:
        wrong, fix = f"{edp} data ranks share an expert (edp = {edp})", f"{fix}, or use a mapping with edp = 1"
    elif not experts_are_unsharded(config.parallelism, config.training, edp):
        wrong = 'parallelism.reshard_after_forward = "always" leaves the experts to FSDP'
        fix += ', or use "auto"'
    if wrong:
        yield f"moe.accumulate_weight_gradients = true has no effect, because {wrong}: {fix}"
