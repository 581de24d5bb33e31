"""The checks of a trainer's numbers that [debug] asks for.

torch and the rest are imported only when there is a trainer, so that a refusal does not wait for them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

from titanmoe import observe
from titanmoe.train.checks import Checks, NumericalFault, Restore

if TYPE_CHECKING:
    from torch import Tensor

    from titanmoe.train.trainer import StepWork, Sums, Trainer
    from titanmoe.watch.stragglers import Stragglers


def checks(trainer: Trainer) -> Checks:
    return NumberChecks(trainer)


class NumberChecks(Checks):
    def __init__(self, trainer: Trainer):
        from titanmoe.watch.replicas import Replicas

        self.trainer, self.options = trainer, trainer.config.debug
        self.replicas = Replicas(trainer) if self.options.replicas_every else None
        self.stragglers: Stragglers | None = None
        """While the run is watched."""
        self.explanations: list[str] = []
        self.last_work: StepWork | None = None
        self.own_losses: Tensor | None = None

    def gradients(self, work: StepWork, own_losses: Tensor) -> None:
        if self.options.rerun:
            self.last_work, self.own_losses = work, own_losses

    def suspect(self, why: str, work: StepWork, finite: bool) -> Sums | None:
        trainer, sums, self.explanations = self.trainer, None, []
        self._compare(trainer.step - 1)
        if self.options.rerun:
            from titanmoe.watch.rerun import repeat

            sums, text = repeat(trainer, work, lambda: self.own_losses)
            same_bits = "the data is the cause: a second forward and backward gives the same bits on all ranks"
            self._say(f"{why}: {text or same_bits}")
            finite = math.isfinite(sums.scalars.loss + sums.scalars.norm)
        if not finite and self.options.culprit != "none":
            from titanmoe.watch.culprit import first_not_finite

            sums, text = first_not_finite(trainer, work)
            self._say(text)
        return sums

    def after_step(self, saves: bool) -> None:
        step = self.trainer.step
        if self.replicas and (saves or step % self.options.replicas_every == 0):
            self._compare(step)
        if self.stragglers is not None:
            self.stragglers.after_step()

    def report(self) -> dict[str, float]:
        return {} if self.stragglers is None else self.stragglers.report()

    def explained(self) -> str:
        return "".join(f"{text[0].upper()}{text[1:]}. " for text in self.explanations)

    def _compare(self, step: int) -> None:
        if self.replicas and (text := self.replicas.compare(step)):
            self._stop(f"{text}{self._reproducible()}")

    def _reproducible(self) -> str:
        """Whether two passes over the last batch with the present weights give the same bits."""
        if self.last_work is None:
            return ""
        from titanmoe.watch.rerun import repeat

        self.trainer.drop_gradients()
        self.trainer.sums(self.last_work)
        _, text = repeat(self.trainer, self.last_work, lambda: self.own_losses)
        self.trainer.drop_gradients()
        return f"; two more passes over the last batch are {text or 'the same on all ranks'}"

    def _stop(self, text: str) -> NoReturn:
        raise (Restore if self.options.on_difference == "restore" else NumericalFault)(text)

    def _say(self, text: str) -> None:
        self.explanations.append(text)
        observe.active.event(self.trainer.step, "suspect", text)
