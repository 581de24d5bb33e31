"""Builds a run from a config: gives each component its table. The model, the loader and the header read most of them,
so these get the whole config.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from titanmoe.checkpoint.state import about_run, persistent_buffers
from titanmoe.config.fields import nested, to_toml
from titanmoe.config.schema import Config
from titanmoe.data.answers import AnswerSet
from titanmoe.data.loader import Loader, ValidationSet
from titanmoe.data.rules import steps_in
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.pipeline_schedules import stage_ranks
from titanmoe.models.count import parameters, training_work
from titanmoe.models.tensors import Tuning
from titanmoe.models.transformer import Transformer
from titanmoe.moe.balance_losses.rules import switched_on
from titanmoe.moe.dispatchers.protocol import SharedBuffers
from titanmoe.moe.layer_statistics import RowLayout
from titanmoe.parallel.apply import build, make_engine, make_meshes
from titanmoe.parallel.context import placement
from titanmoe.parallel.expert import reserve_buffers
from titanmoe.parallel.largest_logits import LargestLogits
from titanmoe.parallel.tied import TiedEnds
from titanmoe.train.answers import Answers, ChoiceSums
from titanmoe.train.checkpoints import Checkpoints
from titanmoe.train.checks import Checks
from titanmoe.train.clock import Clock
from titanmoe.train.console import Shown
from titanmoe.train.divergence import Expected
from titanmoe.train.gradients import Gradients, Slicer
from titanmoe.train.guard import Guard
from titanmoe.train.header import header, set_up
from titanmoe.train.learning_rate import LearningRate
from titanmoe.train.metrics import Metrics, device_name, peak_flops
from titanmoe.train.objectives.cross_entropy import CrossEntropy
from titanmoe.train.objectives.objective import Objective
from titanmoe.train.objectives.rules import OBJECTIVES
from titanmoe.train.optimizers.rules import OPTIMIZERS
from titanmoe.train.qk_clip import QKClip
from titanmoe.train.run_folder import RunFolder
from titanmoe.train.run_state import RunState
from titanmoe.train.runtime import GarbageCollection, Runtime
from titanmoe.train.skips import Skips
from titanmoe.train.step_report import StepReport
from titanmoe.train.training import Training
from titanmoe.train.validation import Validation


def build_training(
    config: Config,
    runtime: Runtime,
    loader: Callable[[Config, int, int], Loader] = Loader,
    garbage: Callable[[int], GarbageCollection] = GarbageCollection,
    checks: Callable[[Config, Training], Checks] = lambda config, training: Checks(),
    build: Callable[[Config, Meshes, int, torch.device], list[Transformer]] = build,
    reserve_buffers: Callable[..., SharedBuffers | None] = reserve_buffers,
    likeliest: bool = False,
) -> Training:
    """All ranks call it together. The arguments after `runtime` replace a component.

    loader: called with the config, the data rank and their number. garbage: with training.gc_every. checks: with the
    config and the Training, when all else is there. reserve_buffers: makes what a step attaches to its
    dispatchers, from their tables. likeliest: the head says the likeliest ids, as a teacher's; this cannot train.
    """
    device, training, with_mtp = runtime.device, config.training, config.model.mtp_depth > 0
    fold = derive(runtime.world, config.parallelism)
    meshes = make_meshes(fold, config.parallelism, config.moe, training, device, config.lora.rank > 0)
    batches = loader(config, meshes.data.rank, meshes.data.size)

    stages = build(config, meshes, batches.microbatches, device)
    rules = OBJECTIVES.look_up(training.objective)
    for head in (stage.head for stage in stages if stage.head is not None):
        head.with_entropy, (head.kept, head.temperature) = rules.entropy, rules.kept(config)
        if likeliest:
            head.top, head.temperature = config.distillation.top, config.distillation.temperature
    engine = make_engine(stages, config.pipeline, config.parallelism, training, meshes, batches.microbatches, device)
    tied = TiedEnds(stages, config.model, stage_ranks(config.pipeline, fold.pp), meshes)
    buffers = {name: b for stage in stages for name, b in persistent_buffers(stage).items()}
    shared_buffers = reserve_buffers(config.model, config.moe, training, meshes, device)

    state = RunState(Skips(config.optimizer))
    place = placement(config.parallelism)
    objective = OBJECTIVES.implementation(training.objective).build(config, meshes)
    every = config.optimizer.qk_clip_every if config.optimizer.qk_clip else config.metrics.max_logit_every
    by_bound = config.optimizer.qk_clip_measure == "bound"
    logits = LargestLogits(config.model, stages, place, meshes, every, by_bound) if every else None
    gradients = Gradients(
        stages,
        engine,
        objective,
        tied,
        shared_buffers,
        meshes,
        config.model,
        RowLayout.of(config.model.num_experts, config.moe),
        state,
        device,
        logits,
    )
    weights = gradients.parameters
    optimizer = OPTIMIZERS.implementation(config.optimizer.name).build(gradients.trained, config, meshes)
    rate = LearningRate(config.optimizer.lr, training.steps, config.lr_schedule)
    slicer_for = partial(Slicer, meshes, place, device)
    notes = set_up(config, fold.pp, batches.microbatches, engine, device)
    slicer = slicer_for(with_mtp, objective, training_work(config.model, Tuning.of(config)))
    if config.distillation.teacher:
        from titanmoe.train.teacher import TeachingSlicer

        slicer = TeachingSlicer(config, slicer, batches, state, build)
        notes["teacher"] = slicer.note
    validation, answers = make_evaluations(config, batches, partial(slicer_for, False), gradients, state)
    if validation:
        notes |= {f"validation, {row}": line for row, line in validation.samples.mix.lost().items()}
    passed_over = steps_in(config.data.skip_steps)
    guard = Guard(config.optimizer, passed_over, state, gradients, optimizer, buffers, batches)
    about = about_run(config, fold)
    checkpoints = Checkpoints(
        config.checkpoint,
        config.model,
        about,
        runtime,
        state,
        batches,
        validation,
        optimizer,
        weights,
        buffers,
        rate,
        config.lora,
    )
    gradients.wants_to_stop = checkpoints.wants_to_stop
    clock = Clock(device)
    made = Training(
        runtime=runtime,
        fold=fold,
        meshes=meshes,
        stages=stages,
        parameters=weights,
        buffers=buffers,
        moe_layers=gradients.moe_layers,
        loader=batches,
        slicer=slicer,
        gradients=gradients,
        guard=guard,
        optimizer=optimizer,
        qk_clip=QKClip(config.optimizer.qk_clip, config.model, weights) if config.optimizer.qk_clip else None,
        rate=rate,
        report=StepReport(with_mtp, bool(config.optimizer.skip_spikes), shared_buffers, state),
        max_grad_norm=config.optimizer.max_grad_norm,
        bias_update_rate=config.moe.bias_update_rate,
        steps=training.steps,
        epochs=training.epochs,
        timeout_s=training.timeout_s,
        state=state,
        folder=RunFolder(config.job, config.checkpoint, runtime.rank),
        checkpoints=checkpoints,
        validation=validation,
        answers=answers,
        set_up=notes | optimizer.notes,
        metrics=build_metrics(config, runtime, fold, clock),
        clock=clock,
        profile=config.profile,
        garbage=garbage(training.gc_every),
    )
    if rules.reference:
        from titanmoe.train.reference import Reference  # few runs need it, and it takes a while

        made.get_ready = Reference(config, made).ready
    guard.checks = checks(config, made)
    return made


def make_evaluations(
    config: Config,
    loader: Loader,
    slicer_for: Callable[[Objective], Slicer],
    gradients: Gradients,
    state: RunState,
) -> tuple[Validation | None, Answers | None]:
    """What the recipe asks for after some steps."""
    meshes, own, last = gradients.meshes, gradients.objective, config.training.steps
    validation = answers = None
    if every := config.validation.interval:
        documents = loader.held_out if config.validation.held_out else ()
        samples = ValidationSet(config, meshes.data.rank, meshes.data.size, documents)
        pairs = OBJECTIVES.look_up(config.training.objective).answers > 1
        slicer = slicer_for(own if pairs else CrossEntropy(meshes))
        validation = Validation(every, last, samples, slicer, gradients, state)
    if every := config.validation.answers.interval:
        questions = AnswerSet(config, meshes.data.rank, meshes.data.size, loader.mix.tokenizer)
        answers = Answers(every, last, questions, slicer_for(ChoiceSums(meshes)), gradients, state)
    return validation, answers


def build_metrics(config: Config, runtime: Runtime, fold: Fold, clock: Clock) -> Metrics:
    name, count = device_name(runtime.device), parameters(config.model)
    peak = config.metrics.peak_tflops * 1e12 or peak_flops(name, config.training.mixed_precision_param)
    known = OBJECTIVES.look_up(config.training.objective).loss_of_a_guess(config)
    guess = known if config.data.source != "synthetic" else math.inf
    return Metrics(
        config.metrics,
        config.model,
        Expected(config.lr_schedule.warmup_steps, config.optimizer.lr, guess),
        Shown(config.training.steps, config.compile.enable, config.moe.force_balance),
        header(config, fold, count, name, peak),
        to_toml(config),
        nested(config),
        tuple(term.metric for term in switched_on(config.moe)),
        runtime,
        fold,
        clock,
        peak,
    )
