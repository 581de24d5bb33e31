"""Builds a run from a config: `build_training`, which titanmoe.train.launch and titanmoe.rehearse call.

Each object gets the tables of the recipe that it reads. The model, the loader and the header read most tables and get
the whole config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from titanmoe.checkpoint.state import persistent_buffers, run_record
from titanmoe.config.fields import to_tables, to_toml
from titanmoe.config.schema import Config
from titanmoe.data.data_constraints import parse_skip_steps
from titanmoe.data.loader import Loader, ValidationSet
from titanmoe.data.quiz import QuizSet
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.pipeline_schedules import stage_ranks
from titanmoe.models.count import training_work
from titanmoe.models.tensors import Tuning
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import HeadOptions
from titanmoe.moe.balance_losses.balance_spec import active_losses
from titanmoe.moe.dispatchers.dispatcher import SharedBuffers
from titanmoe.moe.layer_statistics import RowLayout
from titanmoe.parallel.apply import build, make_engine, make_meshes
from titanmoe.parallel.context import placement
from titanmoe.parallel.expert import choose_dispatcher, reserve_buffers
from titanmoe.parallel.largest_logits import LargestLogits
from titanmoe.parallel.tied_embeddings import TiedEmbeddings
from titanmoe.train.adapter_checkpoints import AdapterCheckpoints
from titanmoe.train.alarms import ExpectedLoss
from titanmoe.train.best import BestStep
from titanmoe.train.checkpoints import Checkpoints
from titanmoe.train.checks import Checks
from titanmoe.train.console import ConsoleSettings
from titanmoe.train.evaluation import Evaluation, QuizEvaluation, Validation
from titanmoe.train.gradients import Gradients, Slicer
from titanmoe.train.guard import Guard
from titanmoe.train.header import make_header, setup_rows
from titanmoe.train.learning_rate import LearningRate
from titanmoe.train.metrics import Metrics, device_name, peak_flops
from titanmoe.train.objectives.cross_entropy import CrossEntropy
from titanmoe.train.objectives.objective import Objective
from titanmoe.train.objectives.objective_spec import OBJECTIVES
from titanmoe.train.optimizers.optimizer_spec import OPTIMIZERS
from titanmoe.train.qk_clip import QKClip
from titanmoe.train.refusals import ranks_per_node
from titanmoe.train.run_folder import RunFolder
from titanmoe.train.run_state import RunState, SkipRule
from titanmoe.train.runtime import GarbageCollection, Runtime
from titanmoe.train.timing import Clock
from titanmoe.train.training import RankModel, Training


def build_training(
    config: Config,
    runtime: Runtime,
    *,
    loader: Callable[[Config, int, int], Loader] = Loader,
    garbage: Callable[[int], GarbageCollection] = GarbageCollection,
    checks: Callable[[Config, RankModel], Checks] = lambda config, model: Checks(),
    build: Callable[..., list[Transformer]] = build,
    reserve_buffers: Callable[..., SharedBuffers | None] = reserve_buffers,
    samples: Callable[[Config, RankModel], Evaluation | None] = lambda config, model: None,
    returns_top_k: bool = False,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Training:
    """Build all objects of a run on this rank: model, data, optimizer, checkpoints, metrics. Collective over the world.

    Weights have their first random values, and nothing is written: `Trainer` loads checkpoints and opens files. The
    first six keyword arguments let tests and tools replace an object of the run.

    Args:
        loader: makes the data loader from the config, the data rank and the number of data ranks.
        garbage: makes the garbage collection from training.gc_every.
        checks: makes the numerical checks from the config and the model with its gradients and optimizer.
        build: makes this rank's stages; has the signature of titanmoe.parallel.apply.build.
        reserve_buffers: makes the buffers of fixed size that dispatchers use in a step's first forward and backward;
            has the signature of titanmoe.parallel.expert.reserve_buffers.
        samples: makes the evaluation that completes the prompts of [validation.samples]; None if there are none.
        returns_top_k: whether the head returns the top-k ids and their log-probabilities, as a teacher's does. Such a
            run cannot train.
        notes: lines to add to the header that is printed at the start, by label.

    Raises:
        ConfigError: the data, the teacher or the dispatcher cannot be used.
    """
    training, device = config.training, runtime.device
    fold = derive(runtime.world, config.parallelism)
    meshes = make_meshes(fold, config, device)
    # Before the model is built, because its parts depend on it.
    node = ranks_per_node(config)
    config, first_pass, chosen = choose_dispatcher(config, meshes, device, node, reserve_buffers)
    batches = loader(config, meshes.data.rank, meshes.data.size)
    objective = OBJECTIVES.implementation(training.objective).build(config, meshes)
    model = build_model(
        config,
        runtime=runtime,
        fold=fold,
        meshes=meshes,
        loader=batches,
        objective=objective,
        build=build,
        first_pass=first_pass,
        returns_top_k=returns_top_k,
    )
    slicer_for = partial(Slicer, meshes=meshes, placement=placement(config.parallelism), device=device)
    slicer = slicer_for(
        with_mtp=config.model.mtp_depth > 0,
        objective=objective,
        work=training_work(config.model, Tuning.of(config)),
        with_index=config.lora.dropout > 0,
    )
    rows = {"dispatcher": chosen} if chosen else {}
    rows |= setup_rows(config, batches.microbatches, model.gradients.engine, device)
    if config.distillation.teacher:
        from titanmoe.train.teacher import SlicerWithTeacher

        slicer = SlicerWithTeacher(config, slicer, batches, model.state, build)
        rows["teacher"] = slicer.note
    validation, quiz = make_evaluations(config, model, partial(slicer_for, with_mtp=False))
    if validation:
        rows |= {f"validation, {row}": line for row, line in validation.samples.mix.truncation_rows().items()}
    if sample_evaluation := samples(config, model):
        rows["samples"] = sample_evaluation.note
    rate = LearningRate(config.optimizer.lr, training.steps, config.lr_schedule)
    clock, best = Clock(device), BestStep.of(config)
    return Training(
        **vars(model),
        slicer=slicer,
        guard=Guard(
            options=config.optimizer,
            skipped_steps=parse_skip_steps(config.data.skip_steps),
            state=model.state,
            gradients=model.gradients,
            optimizer=model.optimizer,
            buffers=model.buffers,
            loader=batches,
            checks=checks(config, model),
        ),
        qk_clip=QKClip(config.optimizer.qk_clip, config.model, model.parameters) if config.optimizer.qk_clip else None,
        rate=rate,
        max_grad_norm=config.optimizer.max_grad_norm,
        bias_update_rate=config.moe.bias_update_rate,
        steps=training.steps,
        epochs=training.epochs,
        timeout_s=training.timeout_s,
        folder=RunFolder(config.job, config.checkpoint, runtime.rank),
        checkpoints=(AdapterCheckpoints if config.lora.rank else Checkpoints)(
            options=config.checkpoint,
            model=config.model,
            run_record=run_record(config, fold),
            runtime=runtime,
            state=model.state,
            loader=batches,
            validation=validation,
            optimizer=model.optimizer,
            parameters=model.parameters,
            buffers=model.buffers,
            rate=rate,
            lora=config.lora,
            best=best,
        ),
        best=best,
        validation=validation,
        quiz=quiz,
        samples=sample_evaluation,
        setup_rows=rows | model.optimizer.notes | notes,
        metrics=build_metrics(config, runtime, fold, clock),
        clock=clock,
        profile=config.profile,
        garbage=garbage(training.gc_every),
        prepare=partial(prepare_reference, config),
    )


def build_model(
    config: Config,
    *,
    runtime: Runtime,
    fold: Fold,
    meshes: Meshes,
    loader: Loader,
    objective: Objective,
    build: Callable[..., list[Transformer]],
    first_pass: SharedBuffers | None,
    returns_top_k: bool,
) -> RankModel:
    """Build this rank's stages, the computation of their gradients and the optimizer. Collective over the world.

    Args:
        config: the resolved config, with a dispatcher chosen.
        build: makes this rank's stages; has the signature of titanmoe.parallel.apply.build.
        first_pass: buffers of fixed size for a step's first forward and backward; None if the dispatcher needs none.
        returns_top_k: whether the head returns the top-k ids and their log-probabilities instead of a loss.
    """
    training, device = config.training, runtime.device
    spec, distillation = OBJECTIVES.look_up(training.objective), config.distillation
    candidates, temperature = spec.teacher_top_k(config)
    head_options = HeadOptions(with_entropy=spec.reads_entropy, candidates=candidates, temperature=temperature)
    if returns_top_k:
        head_options = replace(head_options, top_k=distillation.top, temperature=distillation.temperature)
    stages = build(config, meshes, loader.microbatches, device, head_options=head_options)
    every = config.optimizer.qk_clip_every if config.optimizer.qk_clip else config.metrics.max_logit_every
    state = RunState(SkipRule(config.optimizer))
    gradients = Gradients(
        stages=stages,
        engine=make_engine(stages, config, meshes, loader.microbatches, device),
        objective=objective,
        tied=TiedEmbeddings(stages, config.model, stage_ranks(config.pipeline, fold.pp), meshes),
        first_pass=first_pass,
        meshes=meshes,
        model=config.model,
        layout=RowLayout.of(config.model.num_experts, config.moe),
        state=state,
        device=device,
        logits=LargestLogits(
            model=config.model,
            stages=stages,
            placement=placement(config.parallelism),
            meshes=meshes,
            every=every,
            by_bound=config.optimizer.qk_clip_measure == "bound",
        )
        if every
        else None,
    )
    return RankModel(
        runtime=runtime,
        fold=fold,
        meshes=meshes,
        stages=stages,
        parameters=gradients.parameters,
        buffers={name: b for stage in stages for name, b in persistent_buffers(stage).items()},
        moe_layers=gradients.moe_layers,
        loader=loader,
        gradients=gradients,
        optimizer=OPTIMIZERS.implementation(config.optimizer.name).build(gradients.trained, config, meshes),
        state=state,
    )


def prepare_reference(config: Config, training: Training) -> dict[str, str]:
    """Give the loader the log-probabilities of a reference model, if the objective reads one, else do nothing.

    They are computed before the first step, unless they are stored already. Collective over the world.

    Returns:
        Header lines by label; {} if the objective reads none.
    """
    if not OBJECTIVES.look_up(config.training.objective).reads_reference:
        return {}
    from titanmoe.train.reference import Reference  # few runs need it, and it takes a while

    return Reference(config, training).prepare()


def make_evaluations(
    config: Config, model: RankModel, slicer_for: Callable[..., Slicer]
) -> tuple[Validation | None, QuizEvaluation | None]:
    """Build the validation and the quiz that the recipe asks for; None in place of one that it does not ask for.

    Preference pairs are validated by the run's objective, all else by cross-entropy, whatever the objective is.

    Args:
        slicer_for: called as slicer_for(objective=...); makes the Slicer that takes this rank's part of a batch.
    """
    data, loader = model.meshes.data, model.loader
    of_run = {"last": config.training.steps, "gradients": model.gradients, "state": model.state}
    validation = quiz = None
    if every := config.validation.interval:
        documents = loader.held_out if config.validation.held_out else ()
        pairs = OBJECTIVES.look_up(config.training.objective).completions_per_prompt > 1
        objective = model.gradients.objective if pairs else CrossEntropy(model.meshes)
        validation = Validation(
            interval=every,
            samples=ValidationSet(config, data.rank, data.size, documents),
            slicer=slicer_for(objective=objective),
            **of_run,
        )
    if every := config.validation.quiz.interval:
        quiz = QuizEvaluation(
            interval=every,
            questions=QuizSet(config, data.rank, data.size, loader.mix.tokenizer),
            slicer=slicer_for(objective=CrossEntropy(model.meshes)),
            **of_run,
        )
    return validation, quiz


def build_metrics(config: Config, runtime: Runtime, fold: Fold, clock: Clock) -> Metrics:
    """Build the object that prints the header and writes metrics and events on rank 0. Opens no file yet."""
    name = device_name(runtime.device)
    peak = config.metrics.peak_tflops * 1e12 or peak_flops(name, config.training.mixed_precision_param)
    known = OBJECTIVES.look_up(config.training.objective).uniform_guess_loss(config)
    guess = known if config.data.source != "synthetic" else math.inf
    return Metrics(
        options=config.metrics,
        model=config.model,
        expected=ExpectedLoss(config.lr_schedule.warmup_steps, config.optimizer.lr, guess),
        shown=ConsoleSettings(config.training.steps, config.compile.enable, config.moe.force_balance),
        header=make_header(config, fold, name, peak),
        recipe=to_toml(config),
        values=to_tables(config),
        balance_losses=tuple(term.metric for term in active_losses(config.moe)),
        runtime=runtime,
        fold=fold,
        clock=clock,
        peak=peak,
    )
