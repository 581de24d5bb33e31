"""What is reported about a step. Each number has the same name in every output."""

from __future__ import annotations

from typing import Any

from titanmoe.moe.dispatchers.symm_mem import SymmetricBuffers
from titanmoe.moe.layer_statistics import step_metrics
from titanmoe.train.gradients import Gradients, StepScalars
from titanmoe.train.run_state import RunState


class StepReport:
    def __init__(self, with_mtp: bool, with_skips: bool, gradients: Gradients, state: RunState):
        self.with_mtp, self.with_skips, self.gradients, self.state = with_mtp, with_skips, gradients, state

    def __call__(self, scalars: StepScalars, lr: float) -> dict[str, Any]:
        values = {"loss": scalars.loss, "grad_norm": scalars.norm, "lr": lr, "tokens": scalars.tokens}
        values["flops"] = scalars.flops
        values |= scalars.metrics
        if self.with_mtp:
            values["mtp_loss"] = scalars.mtp_loss
        if self.with_skips:
            values["skipped_steps"] = self.state.skips.skipped
        if isinstance(self.gradients.shared_buffers, SymmetricBuffers):
            values["overflow_reruns"] = self.gradients.overflow_reruns
        if scalars.max_logits:
            values["max_logit"] = max(scalars.max_logits)
            values |= {f"layers.{number}.max_logit": value for number, value in enumerate(scalars.max_logits)}
        return values | step_metrics(scalars.layers)
