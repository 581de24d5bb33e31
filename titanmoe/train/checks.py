"""Interface through which the training loop asks whether its numbers can be trusted.

`titanmoe.watch` implements it (silent errors, ranks that differ); `titanmoe.train` only knows the default here.
"""

from __future__ import annotations

from typing import Any

from titanmoe.observe import Observer


class NumericalFault(RuntimeError):
    """Numbers of a step with which training cannot go on. Raised on all ranks."""


class Restore(NumericalFault):
    """Numbers of a step that are wrong, so that training should go on from the newest checkpoint."""


class Checks(Observer):
    """Default checks, which accept every step. An observer that listens while a run trains."""

    def suspect(self, why: str, work: Any, sums: Any) -> Any:
        """Examine a step with an unusual loss or gradient norm, after its gradients and before its update.

        Args:
            why: what is unusual.
            work: the step's StepWork.
            sums: the step's Sums.

        Returns:
            New Sums if forward and backward were repeated, else None.
        """

    def after_step(self, saves: bool) -> None:
        """Check the state after a step, before it is saved if `saves`.

        Raises:
            NumericalFault: on all ranks, if training cannot go on.
        """

    def report(self) -> dict[str, float]:
        """Return metrics to add to the step's line."""
        return {}

    def explained(self) -> str:
        """Return what was found about the last suspect step, as sentences; "" if nothing was."""
        return ""
