"""The training loop."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from titanmoe import observe
from titanmoe.moe.layer import move_biases
from titanmoe.parallel.batch_slice import check_alike
from titanmoe.parallel.norm import clip
from titanmoe.train.checks import NumericalFault
from titanmoe.train.gradients import StepWork
from titanmoe.train.profile import Profiler
from titanmoe.train.run_folder import command, rewind
from titanmoe.train.runtime import say
from titanmoe.train.training import Training


class Trainer:
    def __init__(self, training: Training):
        self.parts = training
        self.stopping = False
        """Whether a rank has wanted to in the last step."""

    @property
    def step(self) -> int:
        return self.parts.state.step

    @property
    def ends(self) -> bool:
        return self.step >= self.parts.steps or self.stopping

    def train(self) -> int:
        """Train until the last step or a signal; returns the signal, or 0."""
        return self.parts.guard.restoring(self._train)

    def _train(self) -> int:
        parts, checks = self.parts, self.parts.guard.checks
        check_alike(parts.loader.peek(), parts.meshes, parts.device)
        run = parts.folder.claim()
        refused = parts.folder.removed_if_refused()
        with refused, parts.checkpoints.inside(run) as checkpoints, ExitStack() as listening:
            notes = checkpoints.begin() | parts.loader.notes() | parts.set_up
            if parts.metrics.writes:
                rewind(run, self.step)
            parts.metrics.begin(run, self.step, notes)
            for observer in (checks, *((parts.metrics, parts.clock) if parts.metrics.writes else ())):
                listening.enter_context(observe.listening(observer))
            all_threads = parts.gradients.engine.pairs is not None
            profiler = Profiler(parts.profile, run, parts.runtime, all_threads)
            first, paused = self.step + 1, {}
            if self.step >= parts.steps:
                say(
                    f"nothing is left to do: the run in {run} has made {self.step} steps, and training.steps = "
                    f"{parts.steps}\n"
                    f"  to go on:       {command('--training.steps')} --training.steps {2 * self.step}\n"
                    f"  to begin anew:  {command()} --checkpoint.load none   (in a folder of its own)"
                )
            try:
                while not self.ends:
                    with profiler.step(self.step + 1):
                        report = self.train_step()
                    observe.active.phase("validation" if parts.validation else "checkpoint", self.step)
                    for line in parts.loader.epoch_messages:
                        say(line)
                    if report:
                        report |= parts.loader.report() | checks.report()
                        if parts.validation:
                            report |= parts.validation.after_step()
                            observe.active.phase("checkpoint", self.step)
                        # Before saving: a run that resumes from this step then has its line, whenever it was killed.
                        parts.metrics.log(self.step, report | paused)
                        paused = {}
                    checks.after_step(saves=self.ends or checkpoints.due)
                    paused |= checkpoints.after_step()
                    observe.active.phase("other", self.step)
                    parts.garbage.collect(self.step)
                    if self.step == first:
                        parts.runtime.steady_timeout(parts.timeout_s, checkpoints.patient)
                return checkpoints.finish()
            except NumericalFault as error:
                ending = parts.guard.last_word(error, checkpoints.has_saved)
                checkpoints.wait()
                if ending is error:
                    raise
                raise ending from None
            finally:
                parts.loader.close()
                parts.metrics.close()
                parts.folder.unlock()

    def train_step(self) -> dict[str, Any]:
        """What to report of the step; nothing if its batch is passed over."""
        parts, state = self.parts, self.parts.state

        state.step += 1
        observe.active.phase("data", state.step)
        batches = parts.loader.next_step()
        if parts.guard.passes_over():
            return {}
        totals = parts.slicer.count(batches)

        observe.active.phase("forward_backward", state.step)
        work = StepWork(batches, parts.slicer.slices(batches), totals)
        sums = parts.gradients.sums(work)
        self.stopping = bool(sums.scalars.stop)

        verdict = parts.guard(work, sums)

        rate, scalars = parts.rate(state.step), verdict.sums.scalars
        if verdict.update:
            observe.active.gradients(state.step, work, parts.parameters)
            if parts.max_grad_norm > 0:
                clip(parts.parameters.values(), verdict.sums.norm, parts.max_grad_norm)
            parts.optimizer.step(rate)
            num_experts = parts.gradients.num_experts
            move_biases(parts.moe_layers, verdict.sums.experts, num_experts, parts.bias_update_rate)
            state.tokens += scalars.tokens
            observe.active.updated(state.step)
        return parts.report(scalars, rate)
