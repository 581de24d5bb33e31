"""The numerical checks of `[debug]`, which a rank attaches to its training.

`titanmoe.rank` hands `checks` to the trainer. torch and the rest are imported only when training begins, so that a
refused recipe does not wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titanmoe import observe
from titanmoe.train.checks import Checks, NumericalFault, Restore

if TYPE_CHECKING:
    from titanmoe.config.schema import Config, Debug
    from titanmoe.train.gradients import Gradients, StepSums, StepWork
    from titanmoe.train.run_state import RunState
    from titanmoe.train.training import RankModel
    from titanmoe.watch.bit_checks import ReplicaCheck
    from titanmoe.watch.first_nonfinite import NonFiniteTrace
    from titanmoe.watch.stragglers import Stragglers


def checks(config: Config, training: RankModel) -> Checks:
    """Return this rank's NumberChecks, even if [debug] of the config asks for no check. The trainer calls them."""
    from titanmoe.watch.bit_checks import ReplicaCheck

    def trace() -> NonFiniteTrace:
        from titanmoe.watch.first_nonfinite import NonFiniteTrace

        return NonFiniteTrace(training.gradients, training.loader, config.compile, config.model, config.data)

    replicas = ReplicaCheck(training, config.optimizer, config.training.seed) if config.debug.replicas_every else None
    return NumberChecks(config.debug, replicas, trace, training.gradients, training.state)


@dataclass(eq=False)
class NumberChecks(Checks):
    """The numerical checks of a rank: replicas, repeated passes, the first NaN or infinity, and stragglers."""

    options: Debug
    replicas: ReplicaCheck | None
    trace: Callable[[], NonFiniteTrace]
    """Function that builds the trace that finds the first non-finite number of a pass."""
    passes: Gradients
    state: RunState
    stragglers: Stragglers | None = None
    """Measures slow ranks and links; None unless the run is watched."""
    explanations: list[str] = field(default_factory=list)
    """Findings about the latest suspect step."""
    last_work: StepWork | None = None
    """The latest step's batches; None without debug.rerun."""

    def gradients(self, step: int, work: StepWork, parameters: dict[str, Any]) -> None:
        self._remember(work)

    def _remember(self, work: StepWork) -> None:
        if self.options.rerun:
            self.last_work = work

    def suspect(self, why: str, work: StepWork, sums: StepSums) -> StepSums | None:
        self._remember(work)
        second_sums, self.explanations = None, []
        self._compare(self.state.step - 1)
        if self.options.rerun:
            from titanmoe.watch.bit_checks import repeat_pass

            second_sums, text = repeat_pass(self.passes, work, sums.local)
            sums = second_sums
            same_bits = "the data is the cause: a second forward and backward gives the same bits on all ranks"
            self._report(f"{why}: {text or same_bits}")
        if not math.isfinite(sums.scalars.loss + sums.scalars.norm) and self.options.culprit != "none":
            from titanmoe.watch.first_nonfinite import find_first_nonfinite

            second_sums, text = find_first_nonfinite(self.trace(), work)
            self._report(text)
        return second_sums

    def after_step(self, saves: bool) -> None:
        step = self.state.step
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
            fault = Restore if self.options.on_difference == "restore" else NumericalFault
            raise fault(f"{text}{self._describe_repeated_passes()}")

    def _describe_repeated_passes(self) -> str:
        """Return a text on whether two passes over the last batch give the same bits; "" if no batch is remembered.

        Both passes are made here, with the present weights. It drops all gradients. Collective over the world.
        """
        if self.last_work is None:
            return ""
        from titanmoe.watch.bit_checks import repeat_pass

        self.passes.drop()
        first = self.passes.sums(self.last_work)
        _, text = repeat_pass(self.passes, self.last_work, first.local)
        self.passes.drop()
        return f"; two more passes over the last batch are {text or 'the same on all ranks'}"

    def _report(self, text: str) -> None:
        self.explanations.append(text)
        observe.active.event(self.state.step, "suspect", text)
