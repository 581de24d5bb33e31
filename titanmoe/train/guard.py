"""Decides whether a step's gradients become an update, and what happens otherwise. `Trainer` calls it in every step.

* A batch whose step is in data.skip_steps is not used.
* A step with an unusual loss or gradient norm is repeated if the checks can do so, then skipped if
  optimizer.skip_spikes is set.
* A loss or norm that is not finite counts as unusual. It ends the run with the name of the first bad parameter, unless
  optimizer.skip_spikes skips the step.
* If ranks differ, the run continues from its newest checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from titanmoe import observe
from titanmoe.checkpoint.on_all_ranks import on_all_ranks
from titanmoe.checkpoint.write_tensors import describe_first_nonfinite
from titanmoe.config.schema import Optimizer as Options
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Loader
from titanmoe.parallel.data_parallel import free_gathered
from titanmoe.parallel.grad_norm import local_grad
from titanmoe.parallel.materialize import local_shard
from titanmoe.train.checks import Checks, NumericalFault, Restore
from titanmoe.train.gradients import Gradients, StepScalars, StepSums, StepWork
from titanmoe.train.optimizers.optimizer import Optimizer
from titanmoe.train.run_state import DEFAULT_SIGMAS, RunState

RESTORES = 3
"""Number of times that a process restores a checkpoint because ranks differ; after that a machine is at fault."""


class NonFinite(NumericalFault):
    """A loss or gradient norm that is not a finite number."""


class StepVerdict(NamedTuple):
    """The guard's decision whether a step's gradients become an update, and the step's sums after any repetition."""

    update: bool
    """Whether the gradients become an update; if not, they have been freed."""
    sums: StepSums
    """Numbers of the last forward and backward of the step."""


@dataclass(eq=False, kw_only=True)
class Guard:
    """Decision whether a step's gradients become an update, made after the gradients are summed over all ranks."""

    options: Options
    skipped_steps: list[range]
    """Steps whose batch is not used (data.skip_steps)."""
    state: RunState
    gradients: Gradients
    optimizer: Optimizer
    buffers: dict[str, Tensor]
    loader: Loader
    checks: Checks

    def skips_batch(self) -> bool:
        """Return whether data.skip_steps names this step, whose batch is then not used.

        If so, the step is counted as skipped, and an event is written.
        """
        step = self.state.step
        if not any(step in steps for steps in self.skipped_steps):
            return False
        self.state.skips.skipped += 1
        observe.active.event(step, "skip", "its batch is skipped (data.skip_steps)")
        return True

    def __call__(self, work: StepWork, sums: StepSums) -> StepVerdict:
        """Decide whether the step's gradients become an update. Collective over the world.

        The checks examine a step whose loss or norm is unusual or not finite, and may repeat it. If it still is, the
        step makes no update with optimizer.skip_spikes. Without, the update is made, or a number that is not finite
        raises.

        Args:
            sums: the step's loss, gradient norm and statistics over all ranks; the gradients are in `.grad`.

        Returns:
            The decision, and the sums of the step's last forward and backward, which a check may have repeated. Without
                an update the gradients are freed and the step is counted as skipped.

        Raises:
            NumericalFault: on all ranks, if the run cannot go on.
        """
        why = self._find_outlier(sums.scalars)
        if why and (repeated := self.checks.suspect(why, work, sums)):
            sums, why = repeated, self._find_outlier(repeated.scalars)
        if why and self.options.skip_spikes:
            self._skip(why, work.batches)
            return StepVerdict(False, sums)
        self.check_finite(sums.scalars.loss, sums.scalars.norm)
        self.state.skips.accept(sums.scalars.loss, sums.scalars.norm)
        return StepVerdict(True, sums)

    def _find_outlier(self, scalars: StepScalars) -> str:
        return self.state.skips.find_outlier(scalars.loss, scalars.norm, self.options.skip_spikes or DEFAULT_SIGMAS)

    def _skip(self, why: str, batches: list[Batch]) -> None:
        """Free the gradients, count the step as skipped, and write an event with the reason and all ranks' samples.

        Collective over the world.

        Raises:
            NumericalFault: on all ranks, in the optimizer.skip_limit-th such step in a row.
        """
        self.gradients.drop()
        step, skips = self.state.step, self.state.skips
        skips.skipped += 1
        skips.in_a_row += 1
        everyone = on_all_ranks(dist.group.WORLD, lambda: self.loader.digest_samples(batches))
        samples = sorted({number: digest for theirs in everyone for number, digest in theirs.items()}.items())
        text = f"no update, because of {why}"
        if samples:  # a Session's have no numbers
            text += f"; samples {samples[0][0]} to {samples[-1][0]} of the run"
        observe.active.event(step, "skip", text, samples=[list(sample) for sample in samples])
        if skips.in_a_row >= self.options.skip_limit:
            raise NumericalFault(
                f"step {step}: {skips.in_a_row} updates in a row were skipped (optimizer.skip_limit), the last because "
                f"of {why}. The weights are as the last update left them. Lower optimizer.lr, look at these steps' "
                "samples in events.jsonl, or accept such numbers with a larger optimizer.skip_spikes."
            )

    def check_finite(self, loss: float, norm: float) -> None:
        """Raise NonFinite on all ranks if the loss or the gradient norm of the step is not finite.

        All ranks call it with the same numbers; collective over the world if they are not finite. The message names the
        first parameter with a non-finite gradient and the first non-finite weight of any rank.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return
        step = self.state.step
        grads = describe_first_nonfinite({name: local_grad(p) for name, p in self.gradients.trained.items()})
        shards = {name: local_shard(p.detach())[0] for name, p in self.gradients.parameters.items()}
        weights = describe_first_nonfinite(shards | self.buffers)
        names = on_all_ranks(dist.group.WORLD, lambda: (grads, weights))
        grads = next((name for name, _ in names if name), "")
        culprit = f"first parameter with a non-finite gradient: {grads}" if grads else "all gradients are finite"
        rank, weights = next(((rank, name) for rank, (_, name) in enumerate(names) if name), (0, ""))
        before = f"The weights are still those of step {step - 1}"
        advice = "Lower optimizer.lr or raise lr_schedule.warmup_steps; moe.z_loss keeps router logits small."
        if weights and step == 1:
            advice = "They were not finite when they were loaded (model.hf, checkpoint.load): look at those files."
        if weights:
            before = f"The weights were already not finite after step {step - 1}: on rank {rank} {weights}"
        raise NonFinite(
            f"step {step}: loss {loss}, gradient norm {norm}; {culprit}. {before}. {self.checks.explained()}{advice}"
        )

    # ---- going back

    def run_with_restores(self, train: Callable[[], int]) -> int:
        """Call `train`, and again after each of the first RESTORES Restore errors; return what it returns.

        Gradients are dropped and gathered weights freed in between. The Restore error of the last try is raised.

        Args:
            train: loads the newest checkpoint and trains until the end of the run; returns the number of the signal
                that stopped it, or 0.
        """
        for _ in range(RESTORES):
            try:
                return train()
            except Restore:
                self.gradients.drop()
                for stage in self.gradients.stages:
                    free_gathered(stage)  # a validation may have left weights gathered that the checkpoint replaces
        return train()

    def record_end(self, error: NumericalFault, has_saved: bool) -> NumericalFault:
        """Write the event "restore" or "stop" for an error that ends training; return the error to raise.

        Args:
            has_saved: whether a checkpoint of the run exists. Without one a Restore becomes a plain NumericalFault.
        """
        restores = isinstance(error, Restore) and has_saved
        observe.active.event(self.state.step, "restore" if restores else "stop", str(error))
        if isinstance(error, Restore) and not restores:
            return NumericalFault(f"{error}. There is no checkpoint to restore")
        return error
