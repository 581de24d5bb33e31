"""What a rank gives its run: the watch over all ranks, and the checks of numbers that [debug] switches on.

torch and the rest are imported only when training begins, so that a refusal does not wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from titanmoe import observe
from titanmoe.train.checks import Checks, NumericalFault, Restore

if TYPE_CHECKING:
    from titanmoe.config.schema import Config, Debug
    from titanmoe.train.gradients import Gradients, StepWork, Sums
    from titanmoe.train.run_state import RunState
    from titanmoe.train.training import RankModel, Training
    from titanmoe.watch.bit_checks import Replicas
    from titanmoe.watch.first_nonfinite import Trace
    from titanmoe.watch.stragglers import Stragglers


@contextmanager
def watched(config: Config, training: Training) -> Iterator[None]:
    """Watch the run's ranks. All of them enter it together; if one is late, the process ends here with a report."""
    if training.runtime.world == 1 or not config.training.watch:
        yield
        return
    from titanmoe.watch.run_watch import Watch

    with Watch(config.training, config.checkpoint, training):
        yield


def checks(config: Config, training: RankModel) -> Checks:
    from titanmoe.watch.bit_checks import Replicas

    def trace() -> Trace:
        from titanmoe.watch.first_nonfinite import Trace

        return Trace(training.gradients, training.loader, config.compile, config.model, config.data)

    replicas = Replicas(training, config.optimizer, config.training.seed) if config.debug.replicas_every else None
    return NumberChecks(config.debug, replicas, trace, training.gradients, training.state)


@dataclass(eq=False)
class NumberChecks(Checks):
    options: Debug
    replicas: Replicas | None
    trace: Callable[[], Trace]
    """Makes the trace that finds the first number of a pass that is not finite."""
    passes: Gradients
    state: RunState
    stragglers: Stragglers | None = None
    """While the run is watched."""
    explanations: list[str] = field(default_factory=list)
    last_work: StepWork | None = None

    def gradients(self, step: int, work: StepWork, parameters: dict[str, Any]) -> None:
        self._remember(work)

    def _remember(self, work: StepWork) -> None:
        if self.options.rerun:
            self.last_work = work

    def suspect(self, why: str, work: StepWork, sums: Sums) -> Sums | None:
        self._remember(work)
        again, self.explanations = None, []
        self._compare(self.state.step - 1)
        if self.options.rerun:
            from titanmoe.watch.bit_checks import repeat

            again, text = repeat(self.passes, work, sums.own)
            sums = again
            same_bits = "the data is the cause: a second forward and backward gives the same bits on all ranks"
            self._say(f"{why}: {text or same_bits}")
        if not math.isfinite(sums.scalars.loss + sums.scalars.norm) and self.options.culprit != "none":
            from titanmoe.watch.first_nonfinite import first_not_finite

            again, text = first_not_finite(self.trace(), work)
            self._say(text)
        return again

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
            self._stop(f"{text}{self._reproducible()}")

    def _reproducible(self) -> str:
        """Whether two passes over the last batch with the present weights give the same bits."""
        if self.last_work is None:
            return ""
        from titanmoe.watch.bit_checks import repeat

        self.passes.drop()
        first = self.passes.sums(self.last_work)
        _, text = repeat(self.passes, self.last_work, first.own)
        self.passes.drop()
        return f"; two more passes over the last batch are {text or 'the same on all ranks'}"

    def _stop(self, text: str) -> NoReturn:
        raise (Restore if self.options.on_difference == "restore" else NumericalFault)(text)

    def _say(self, text: str) -> None:
        self.explanations.append(text)
        observe.active.event(self.state.step, "suspect", text)
