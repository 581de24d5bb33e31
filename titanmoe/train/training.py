"""The components of a run on one rank, as `build_training` makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Profile
from titanmoe.data.loader import Loader
from titanmoe.fold.degrees import Fold
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.layer import MoE
from titanmoe.moe.layer_statistics import step_metrics
from titanmoe.train.checkpoints import Checkpoints
from titanmoe.train.evaluation import Answers, Validation
from titanmoe.train.gradients import FirstPass, Gradients, Slicer, StepScalars
from titanmoe.train.guard import Guard
from titanmoe.train.learning_rate import LearningRate
from titanmoe.train.metrics import Metrics
from titanmoe.train.optimizers.optimizer import Optimizer
from titanmoe.train.qk_clip import QKClip
from titanmoe.train.run_folder import RunFolder
from titanmoe.train.run_state import RunState
from titanmoe.train.runtime import GarbageCollection, Runtime
from titanmoe.train.timing import Clock


@dataclass(eq=False, kw_only=True)
class StepReport:
    """What is reported about a step. Each number has the same name in every output."""

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


@dataclass(eq=False, kw_only=True)
class RankModel:
    """A rank's share of the model, its data, and what computes and applies its gradients."""

    runtime: Runtime
    fold: Fold
    meshes: Meshes

    # The model, as far as it is on this rank.
    stages: list[Transformer]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    moe_layers: dict[int, MoE]

    loader: Loader
    gradients: Gradients
    optimizer: Optimizer
    state: RunState

    @property
    def device(self) -> torch.device:
        return self.runtime.device


@dataclass(eq=False, kw_only=True)
class Training(RankModel):
    # A step.
    slicer: Slicer
    guard: Guard
    qk_clip: QKClip | None
    rate: LearningRate
    report: StepReport
    max_grad_norm: float
    """Gradients are clipped to it; 0 for no limit."""
    bias_update_rate: float

    # A run.
    steps: int
    epochs: int
    """0 if the run has a number of steps of its own."""
    timeout_s: int
    """How long a collective may take, once the first step is done."""
    folder: RunFolder
    checkpoints: Checkpoints
    validation: Validation | None
    answers: Answers | None
    set_up: dict[str, str]
    """Rows of the header."""
    metrics: Metrics
    clock: Clock
    profile: Profile
    garbage: GarbageCollection
    get_ready: Callable[[Training], dict[str, str]]
    """Called when the weights are there, before the first step. Returns rows of the header."""

    @property
    def evaluations(self) -> list[Validation | Answers]:
        """What may be due after a step."""
        return [evaluation for evaluation in (self.validation, self.answers) if evaluation]
