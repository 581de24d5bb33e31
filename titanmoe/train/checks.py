"""How a trainer asks whether its numbers can be trusted. The answers come from titanmoe/watch, which it does not
know."""

from __future__ import annotations

from typing import Any

from titanmoe.observe import Observer


class NumericalFault(RuntimeError):
    """Training cannot go on with these numbers. Raised on all ranks."""


class Restore(NumericalFault):
    """Training can go on from the newest checkpoint."""


class Checks(Observer):
    """The default, which trusts everything. Listens while a run trains."""

    def suspect(self, why: str, work: Any, sums: Any) -> Any:
        """Called between gradients and update if the step's loss or gradient norm is unusual.

        why: what is wrong. work: the step's StepWork. sums: its Sums. Returns new Sums if the forward and backward were
        repeated, else None.
        """

    def after_step(self, saves: bool) -> None:
        """Called after every step, and before the state is saved if this step saves. May raise NumericalFault."""

    def report(self) -> dict[str, float]:
        """More numbers for the step's line."""
        return {}

    def explained(self) -> str:
        """What was found about the last suspect step, as sentences; "" if nothing was."""
        return ""
