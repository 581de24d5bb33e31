"""Which weights data ranks share, and whether the gathered ones stay. Without torch: the planner asks too."""

from __future__ import annotations

from titanmoe.config.schema import Parallelism, Training


def reshard(options: Parallelism) -> bool:
    """Whether gathered weights are freed between forward and backward."""
    choice = options.reshard_after_forward
    return options.pp == 1 if choice == "auto" else choice == "always"


def experts_are_unsharded(options: Parallelism, training: Training, edp: int) -> bool:
    """Whether experts are in no FSDP unit, because no other data rank shares theirs and there is nothing to gather.

    Their copies live as long as the step's forward and backward, so "always" leaves them to FSDP, a layer at a time.
    """
    return edp == 1 and not (are_copied(training) and options.reshard_after_forward == "always")


def are_copied(training: Training) -> bool:
    """Whether weights that are trained are computed with in another dtype than the one they are stored in."""
    return training.dtype != training.mixed_precision_param
