"""Which weights data ranks share, and whether the gathered ones stay. Without torch: the planner asks too."""

from __future__ import annotations

from titanmoe.config.schema import Parallelism, Training


def reshard(options: Parallelism) -> bool:
    """Whether gathered weights are freed between forward and backward."""
    choice = options.reshard_after_forward
    return options.pp == 1 if choice == "auto" else choice == "always"


def experts_are_unsharded(options: Parallelism, training: Training, edp: int) -> bool:
    """Whether experts are in no FSDP unit, because no other data rank shares theirs and there is nothing to gather.

    A copy in another dtype lives as long as the step's forward and backward, so "always" leaves it to FSDP to make one
    layer after the other.
    """
    copied = training.dtype != training.mixed_precision_param
    return edp == 1 and not (copied and options.reshard_after_forward == "always")
