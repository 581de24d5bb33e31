"""The training loop: `titanmoe.train.launch.main` builds a `Training` and calls `Trainer(training).train()`.

A step gets its batches, computes gradients, asks the guard whether they may become an update, clips, updates the
weights, moves the routers' selection biases, and reports.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from titanmoe import observe
from titanmoe.checkpoint.on_all_ranks import on_all_ranks
from titanmoe.data.describe_samples import describe_first_sample
from titanmoe.data.source_mix import TRUNCATION_ROWS
from titanmoe.moe.balance import update_expert_bias
from titanmoe.parallel.batch_slice import check_alike
from titanmoe.parallel.grad_norm import clip
from titanmoe.train.checks import NumericalFault
from titanmoe.train.gradients import StepSums, StepWork
from titanmoe.train.run_folder import SAMPLE, rewind, typed_command
from titanmoe.train.runtime import print_rank_0
from titanmoe.train.timing import Profiler
from titanmoe.train.training import Training


def update(training: Training, work: StepWork, sums: StepSums, rate: float) -> dict[str, Any]:
    """Clip a step's gradients and update the weights, unless the guard refuses; return the step's metrics by name.

    An update also applies QK-Clip if logits were measured, moves the selection biases and counts the run's tokens. The
    gradients are freed in any case. Collective over the world.

    Args:
        training: the run, whose `state.step` is this step already.
        sums: loss, gradient norm and statistics of the step, whose gradients are in `.grad`.

    Raises:
        NumericalFault: on all ranks, if the run cannot go on, such as with a loss that is not finite.
    """
    step, verdict = training.state.step, training.guard(work, sums)
    scalars = verdict.sums.scalars
    if verdict.update:
        observe.active.gradients(step, work, training.gradients.trained)
        norm = verdict.sums.norm
        if training.max_grad_norm > 0:
            norm = clip(training.gradients.trained.values(), norm, training.max_grad_norm)
        with observe.region("optimizer"):
            training.optimizer.step(rate, norm)
            if training.qk_clip and verdict.sums.logits is not None:
                training.qk_clip(verdict.sums.logits)
        routers = {number: moe.router for number, moe in training.moe_layers.items()}
        loads = {number: layer.load for number, layer in verdict.sums.layers.items()}
        update_expert_bias(routers, loads, training.bias_update_rate)
        training.state.tokens += scalars.tokens
        observe.active.updated(step)
    return training.report(scalars, rate)


class Trainer:
    """The training loop of one rank; all ranks run it together."""

    def __init__(self, training: Training):
        self.training = training
        self.stopping = False
        """Whether any rank asked for training to end after the last step."""
        self.labelled = self.unlabelled = 0
        """Numbers of steps of this process whose batch had labels, and had none."""

    @property
    def step(self) -> int:
        """Number of steps that the run has made."""
        return self.training.state.step

    @property
    def is_finished(self) -> bool:
        """True if training ends with the step just made: the last one, or one after which it has to stop."""
        best = self.training.best
        return self.step >= self.training.steps or self.stopping or (best is not None and best.stops)

    def train(self) -> int:
        """Train until the last step, a signal, or training.stop_after ends it. Collective over the world.

        After a Restore it begins again from the newest checkpoint, RESTORES times at most.

        Returns:
            The number of the signal that stopped training, or 0.

        Raises:
            NumericalFault: if training must not go on, such as with a loss that is not finite.
            ConfigError: the run's folder, its data or what it starts from cannot be used.
            CheckpointError: a save failed.
        """
        return self.training.guard.run_with_restores(self._train)

    def _train(self) -> int:
        training, checks = self.training, self.training.guard.checks
        check_alike(training.loader.peek(), training.meshes, training.device)
        run = training.folder.claim()
        refused = training.folder.cleaned_up_if_refused()
        with refused, training.checkpoints.in_folder(run) as checkpoints, ExitStack() as listening:
            notes = (
                checkpoints.begin() | training.loader.header_rows() | training.setup_rows | training.prepare(training)
            )
            sample = ""
            if training.metrics.writes:
                rewind(run, self.step)
                sample = "" if self.step else describe_first_sample(training.loader)
                notes |= {"first sample": str(run / SAMPLE)} if sample else {}
            training.metrics.begin(run, self.step, notes, sample)
            if training.metrics.writes:
                for line in (line for row, line in notes.items() if row.endswith((*TRUNCATION_ROWS, "context"))):
                    training.metrics.event(self.step, "data", line)
            for observer in (checks, *((training.metrics, training.clock) if training.metrics.writes else ())):
                listening.enter_context(observe.listening(observer))
            all_threads = training.gradients.engine.pairs is not None
            profiler = Profiler(training.profile, run, training.runtime, all_threads)
            first, paused, is_cold = self.step + 1, {}, True
            if self.step >= training.steps:
                option, has, more = "training.steps", training.steps, 2 * self.step
                if training.epochs:
                    option, has, more = "training.epochs", training.epochs, training.epochs + 1
                print_rank_0(
                    f"nothing is left to do: the run in {run} has made {self.step} steps, and {option} = {has}\n"
                    f"  to continue:    {typed_command(f'--{option}')} --{option} {more}\n"
                    f"  to start anew:  {typed_command()} --checkpoint.load none   (in a folder of its own)"
                )
            elif training.best and training.best.stops:
                more = f"{typed_command('--training.stop_after')} --training.stop_after {2 * training.best.stop_after}"
                print_rank_0(f"nothing is left to do: {training.best.why_stopped()}\n  to continue:    {more}")
            try:
                while not self.is_finished:
                    with profiler.step(self.step + 1):
                        report = self.train_step()
                    observe.active.phase("validation" if training.evaluations else "checkpoint", self.step)
                    for line in training.loader.epoch_messages:
                        print_rank_0(line)
                    if self.step >= training.steps and first == 1 and self.unlabelled and not self.labelled:
                        raise NumericalFault(
                            f"none of {self.unlabelled:,} steps had a label, so nothing was learned: the samples may "
                            "lack assistant messages (docs/data.md, Chats)"
                        )
                    if report:
                        report |= training.loader.report() | checks.report()
                        for evaluation in training.evaluations:
                            report |= evaluation.after_step()
                        if training.best:
                            training.best.after_step(self.step, report)
                        if training.evaluations:
                            observe.active.phase("checkpoint", self.step)
                        # Before saving: a run that resumes from this step then has its line, whenever it was killed.
                        training.metrics.log(self.step, report | paused)
                        paused = {}
                    checks.after_step(saves=self.is_finished or checkpoints.is_due)
                    paused |= checkpoints.after_step()
                    observe.active.phase("other", self.step)
                    training.garbage.collect(self.step)
                    if is_cold and report:  # a skipped step loads no kernels, and leaves the first one slow
                        training.runtime.steady_timeout(training.timeout_s, checkpoints.long_timeout_groups)
                        is_cold = False
                if training.best and training.best.stops and self.step >= first:
                    print_rank_0(f"stopped    {training.best.why_stopped()}")
                return checkpoints.finish()
            except NumericalFault as error:
                ending = training.guard.record_end(error, checkpoints.has_saved)
                checkpoints.wait()
                if ending is error:
                    raise
                raise ending from None
            finally:
                training.loader.close()
                training.metrics.close()
                training.folder.unlock()

    def train_step(self) -> dict[str, Any]:
        """Make one step: read a batch, compute gradients, update the weights. Collective over the world.

        Returns:
            The step's metrics by name, numbers and the lists "layers.N.load"; {} if its batch is skipped
                (data.skip_steps).

        Raises:
            NumericalFault: on all ranks, if the run cannot go on.
        """
        training, state = self.training, self.training.state

        state.step += 1
        observe.active.phase("data", state.step)
        batches = training.loader.next_step()
        if training.guard.skips_batch():
            self.stopping = any(on_all_ranks(training.checkpoints.group, training.checkpoints.wants_to_stop))
            return {}
        totals = training.slicer.count(batches)

        observe.active.phase("forward_backward", state.step)
        work = StepWork(batches, training.slicer.slices(batches), totals)
        sums = training.gradients.sums(work, training.checkpoints.wants_to_stop)
        self.stopping = sums.scalars.stop

        self._count_labels(sums.scalars.divisor)
        return update(training, work, sums, training.rate(state.step))

    def _count_labels(self, divisor: float) -> None:
        """Count a step as one with or without labels; write an event at this process's 1st, 2nd, 4th, ... without.

        `divisor` is its number of labels, or another divisor of the objective.
        """
        self.labelled += divisor > 0
        self.unlabelled += not divisor
        if not divisor and self.unlabelled.bit_count() == 1:
            which = (
                f"; so had {self.unlabelled - 1:,} of the {self.step - 1:,} steps before" if self.unlabelled > 1 else ""
            )
            text = f"no token of this step's batch is a label, so its loss is 0 and nothing is learned from it{which}"
            observe.active.event(self.step, "no labels", text)
