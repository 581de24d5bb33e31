"""Where a trainer asks whether its numbers can be trusted. What answers stands above it, in titanmoe/watch."""

from __future__ import annotations

from typing import Any


class Unsound(RuntimeError):
    """Training cannot go on from its numbers. Raised on all ranks alike."""


class Restore(Unsound):
    """It can go on from those of the newest checkpoint."""


class Checks:
    """This one trusts everything."""

    def suspect(self, why: str, work: Any, finite: bool) -> Any:
        """Called between gradients and update when the step's loss or norm is not usual.

        why: what is wrong with it. work: the step's StepWork. finite: whether both are finite. Returns other Sums
        if the step's forward and backward were repeated, else None.
        """

    def after_step(self, saves: bool) -> None:
        """Called before the state is saved, if it is, and after every other step. Raises Unsound."""

    def report(self) -> dict[str, float]:
        """More numbers for the step's line."""
        return {}

    def explained(self) -> str:
        """What is known of the last suspicion, as sentences; "" for nothing."""
        return ""
