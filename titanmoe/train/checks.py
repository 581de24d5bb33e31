"""Interface through which the training loop asks whether its numbers can be trusted.

`titanmoe.watch` implements it (silent errors, ranks that differ); `titanmoe.train` only knows the default here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanmoe.observe import Observer

if TYPE_CHECKING:
    from titanmoe.train.gradients import StepSums, StepWork


class NumericalFault(RuntimeError):
    """Numbers of a step with which training cannot go on. Raised on all ranks."""


class Restore(NumericalFault):
    """Wrong numbers in a step, after which training continues from the newest checkpoint. Raised on all ranks."""


class Checks(Observer):
    """Default numerical checks, which accept every step; `titanmoe.watch` has real ones. An observer of the run."""

    def suspect(self, why: str, work: StepWork, sums: StepSums) -> StepSums | None:
        """Examine a step whose loss or gradient norm is unusual; here do nothing and return None.

        The Guard calls it on all ranks before the update.

        Args:
            why: what is unusual, as text.
            sums: the step's loss, gradient norm and statistics over all ranks.

        Returns:
            New sums if forward and backward were repeated, whose gradients are then in `.grad`; else None.

        Raises:
            NumericalFault: on all ranks, if training cannot go on; a Restore if the newest checkpoint may help.
        """

    def after_step(self, saves: bool) -> None:
        """Check weights and optimizer state after a step; here do nothing. Collective over the world in subclasses.

        Args:
            saves: whether a checkpoint is saved after this step.

        Raises:
            NumericalFault: on all ranks, if training cannot go on.
        """

    def report(self) -> dict[str, float]:
        """Return metrics of the checks by name, to add to those of the step; {} by default."""
        return {}

    def explained(self) -> str:
        """Return what was found out about the last step with an unusual loss or norm, as sentences; "" by default."""
        return ""
