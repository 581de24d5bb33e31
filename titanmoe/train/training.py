"""Everything that a run consists of on one rank. `titanmoe.train.build.build_training` makes it, `Trainer` uses it.

titanmoe.session and titanmoe.rl use its components without the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanmoe.checkpoint.state import Targets, shards_to_load
from titanmoe.config.schema import Profile
from titanmoe.data.loader import Loader
from titanmoe.fold.degrees import Fold
from titanmoe.fold.meshes import Meshes
from titanmoe.models.transformer import Transformer
from titanmoe.moe.layer import MoE
from titanmoe.moe.layer_statistics import step_metrics
from titanmoe.train.best import BestStep
from titanmoe.train.checkpoints import Checkpoints
from titanmoe.train.evaluation import Evaluation, QuizEvaluation, Validation
from titanmoe.train.gradients import Gradients, Slicer, StepScalars
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
class RankModel:
    """The model's stages on one rank, its data, and what computes and applies its gradients."""

    runtime: Runtime
    fold: Fold
    meshes: Meshes

    stages: list[Transformer]
    """This rank's pipeline stages."""
    parameters: dict[str, nn.Parameter]
    """Parameters of all stages of this rank, by name."""
    buffers: dict[str, Tensor]
    """Persistent buffers of all stages of this rank, by name."""
    moe_layers: dict[int, MoE]
    """This rank's MoE layers by the number of their block in the model."""

    loader: Loader
    gradients: Gradients
    optimizer: Optimizer
    state: RunState

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    @property
    def shards(self) -> Targets:
        """This rank's shards of all weights and selection biases, adapters and frozen weights among them.

        By "model.NAME": the stored tensor's name and a TensorShard, whose `tensor` is the live weight's memory.
        """
        return shards_to_load(self.parameters, self.buffers, None, self.stages[0].shape.tie_embeddings)


@dataclass(eq=False, kw_only=True)
class Training(RankModel):
    """A run on one rank: the model, and what a step, an evaluation, a checkpoint and a report need."""

    # A step.
    slicer: Slicer
    guard: Guard
    qk_clip: QKClip | None
    rate: LearningRate
    max_grad_norm: float
    """Gradient norm that gradients are clipped to; 0 for no limit."""
    bias_update_rate: float
    """Step size of the routers' selection biases (moe.bias_update_rate)."""

    # A run.
    steps: int
    """Step at which the run ends."""
    epochs: int
    """Epochs from which `steps` was derived; 0 if the recipe sets training.steps."""
    timeout_s: int
    """Seconds that a collective may take after the first step."""
    folder: RunFolder
    checkpoints: Checkpoints
    best: BestStep | None
    validation: Validation | None
    quiz: QuizEvaluation | None
    samples: Evaluation | None
    """Evaluation that completes the prompts of [validation.samples]."""
    setup_rows: dict[str, str]
    """Lines of the header, by label, that are known once the model is built."""
    metrics: Metrics
    clock: Clock
    profile: Profile
    garbage: GarbageCollection
    prepare: Callable[[Training], dict[str, str]]
    """Function called once the weights are loaded, before the first step. Returns lines of the header, by label."""

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations between steps that the recipe asks for."""
        return [evaluation for evaluation in (self.validation, self.quiz, self.samples) if evaluation]

    def report(self, scalars: StepScalars, lr: float) -> dict[str, Any]:
        """Return the metrics of a step by name, as `Metrics.log` takes them; "grad_norm" is that before clipping."""
        values = {"loss": scalars.loss, "grad_norm": scalars.norm, "lr": lr, "tokens": scalars.tokens}
        values["flops"] = scalars.flops
        values |= scalars.metrics
        if self.gradients.model.mtp_depth:
            values["mtp_loss"] = scalars.mtp_loss
        if self.guard.options.skip_spikes:
            values["skipped_steps"] = self.state.skips.skipped
        if self.gradients.first_pass is not None:
            values |= self.gradients.first_pass.metrics()
        if scalars.max_logits:
            values["max_logit"] = max(scalars.max_logits)
            values |= {f"layers.{number}.max_logit": value for number, value in enumerate(scalars.max_logits)}
        return values | step_metrics(scalars.layers)
