"""What is reported about a step. Each number has the same name in every output."""

from __future__ import annotations

from typing import Any

from titanmoe.moe.balance import ROUTING
from titanmoe.moe.dispatchers.symm_mem import SymmetricBuffers
from titanmoe.moe.layer import layer_metrics
from titanmoe.train.gradients import Gradients, StepScalars
from titanmoe.train.run_state import RunState


class StepReport:
    def __init__(self, with_mtp: bool, with_skips: bool, gradients: Gradients, state: RunState):
        self.terms = gradients.statistics[: -len(ROUTING)]
        self.with_mtp, self.with_skips, self.gradients, self.state = with_mtp, with_skips, gradients, state

    def __call__(self, scalars: StepScalars, lr: float) -> dict[str, Any]:
        values = {"loss": scalars.loss, "grad_norm": scalars.norm, "lr": lr, "tokens": scalars.tokens}
        values |= scalars.metrics
        if self.with_mtp:
            values["mtp_loss"] = scalars.mtp_loss
        gradients = self.gradients
        layers = {
            number: layer_metrics(row, gradients.num_experts, gradients.statistics)
            for number, row in scalars.layers.items()
        }
        if self.with_skips:
            values["skipped_steps"] = self.state.skips.skipped
        if isinstance(self.gradients.shared_buffers, SymmetricBuffers):
            values["overflow_reruns"] = self.gradients.overflow_reruns
        if layers:
            for name in self.terms:
                values[name] = sum(layer[name] for layer in layers.values())
            values["imbalance"] = max(layer["imbalance"] for layer in layers.values())
            for name in ("router_entropy", "dropped_fraction"):
                values[name] = sum(layer[name] for layer in layers.values()) / len(layers)
        if scalars.max_logits:
            values["max_logit"] = max(scalars.max_logits)
            values |= {f"layers.{number}.max_logit": value for number, value in enumerate(scalars.max_logits)}
        for number, layer in layers.items():
            values |= {f"layers.{number}.{name}": value for name, value in layer.items()}
        return values
