"""What is reported about a step. Each number has the same name in every output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanmoe.moe.layer_statistics import step_metrics
from titanmoe.train.gradients import FirstPass, StepScalars
from titanmoe.train.run_state import RunState


@dataclass(eq=False, kw_only=True)
class StepReport:
    with_mtp: bool
    with_skips: bool
    first_pass: FirstPass | None
    state: RunState

    def __call__(self, scalars: StepScalars, lr: float) -> dict[str, Any]:
        values = {"loss": scalars.loss, "grad_norm": scalars.norm, "lr": lr, "tokens": scalars.tokens}
        values["flops"] = scalars.flops
        values |= scalars.metrics
        if self.with_mtp:
            values["mtp_loss"] = scalars.mtp_loss
        if self.with_skips:
            values["skipped_steps"] = self.state.skips.skipped
        if self.first_pass is not None:
            values |= self.first_pass.metrics()
        if scalars.max_logits:
            values["max_logit"] = max(scalars.max_logits)
            values |= {f"layers.{number}.max_logit": value for number, value in enumerate(scalars.max_logits)}
        return values | step_metrics(scalars.layers)
