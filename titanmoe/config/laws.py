"""Checks of a config that hold on any machine: ranges of numbers, and fields that contradict each other.

What depends on the world size is checked with the mapping (`titanmoe.fold`). What a component or its room knows is
checked through `Config.components`. Every message has the values, the constraint and the fix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titanmoe.config.blocks import moe_layers
from titanmoe.config.field_values import closest
from titanmoe.config.fields import fields, ranges
from titanmoe.config.model_file import path_of
from titanmoe.config.ranges import LIMIT, Violation, divisors, nearest_values, number_text
from titanmoe.config.schema import OWN, QUIZ_METRICS, Checkpoint, Config, Job, Model, MoE, Training

WIDTHS = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number of each dtype."""


def out_of_range(values: Mapping[str, Any]) -> list[Violation]:
    """Return a violation for each number outside its range, given the values of fields by path.

    nan, infinity and numbers of at least 2^63 in size are outside every range. Fields without a value are skipped.
    """
    violations = []
    for path, limits in ranges().items():
        value = values.get(path, [])
        several = isinstance(value, list)
        for place, number in enumerate(value if several else [value]):
            name = f"{path}[{place}]" if several else path
            if number != number or number in (math.inf, -math.inf):
                violations.append(Violation((path,), f"{name} = {number} is not a finite number: it must be {limits}"))
            elif number not in limits or not -LIMIT < number < LIMIT:
                why = f", because {limits.reason}" if limits.reason and number > 0 else ""
                if number in limits:
                    why = " and below 2**63 = 9.2e18, because larger ones do not fit into 64 bits"
                instead = f": {limits.instead}" if limits.instead else ""
                text = f"{name} = {number_text(number)} is out of range: it must be {limits}{why}{instead}"
                violations.append(Violation((path,), text))
    return violations


def contradictions(config: Config) -> list[Violation]:
    """Return a violation for each set of fields that contradict each other. Numbers must already be in their ranges.

    Raises ComponentError if a component that the config names cannot be used.
    """
    return [
        *_job(config.job),
        *_change(config.model),
        *_shape(config.model),
        *_window(config.model),
        *_rope(config.model),
        *_routing(config.model),
        *_length(config.training),
        *_precision(config.training),
        *_dropping(config.moe),
        *config.components.contradictions(config),
        *_products(config),
        *_profile(config),
        *_checkpoint(config.checkpoint),
        *_best(config),
        *_debug(config),
    ]


def _job(job: Job) -> Iterator[Violation]:
    if job.name in (".", "..") or "/" in job.name or "\\" in job.name:
        yield Violation(
            ("job.name",),
            f"job.name = {job.name!r} is not a folder name: leave out . .. / and \\ "
            "(job.dump_folder says where the run's folder goes)",
        )


def _change(model: Model) -> Iterator[Violation]:
    known = {*fields(), *(f"{OWN}.{name}" for name in model.own)}
    for name in model.change:
        if path_of(name) not in known:
            names = [path.removeprefix("model.") for path in known]
            near = closest(name, names)
            hint = f"did you mean {near}?" if near else 'write a field of [model] by its name, such as "rope_theta"'
            yield Violation(("model.change",), f"model.change has {json.dumps(name)}, which is not a field: {hint}")


def _debug(config: Config) -> Iterator[Violation]:
    debug, checkpoint = config.debug, config.checkpoint
    if debug.rerun and not config.training.deterministic:
        yield Violation(
            ("debug.rerun", "training.deterministic"),
            "debug.rerun = true compares the bits of two passes, but training.deterministic = false lets them differ: "
            "set deterministic = true, or rerun = false",
        )
    if debug.on_difference != "restore":
        return
    if not debug.replicas_every:
        yield Violation(
            ("debug.on_difference", "debug.replicas_every"),
            'debug.on_difference = "restore" waits for a difference, but debug.replicas_every = 0 looks for none: set '
            "it, such as 100",
        )
    if not checkpoint.enable or checkpoint.load == "none" or checkpoint.load.isdecimal():
        yield Violation(
            ("debug.on_difference", "checkpoint.enable", "checkpoint.load"),
            'debug.on_difference = "restore" goes back to the newest checkpoint of the run, but checkpoint.enable = '
            f"{json.dumps(checkpoint.enable)} and checkpoint.load = {json.dumps(checkpoint.load)}: set enable = true "
            'and load = "auto"',
        )


def _shape(model: Model) -> Iterator[Violation]:
    layers, dense = model.num_layers, model.num_dense_layers
    if dense > layers:
        yield Violation(
            ("model.num_dense_layers", "model.num_layers"),
            f"model.num_dense_layers = {dense} exceeds model.num_layers = {layers}: use at most {layers}",
        )
    elif dense < layers and moe_layers(model) == 0:
        yield Violation(
            ("model.moe_every", "model.num_layers", "model.num_dense_layers"),
            f"model.moe_every = {model.moe_every} gives experts to none of the {layers - dense} blocks after the "
            f"{dense} dense ones: use at most {layers - dense}, or num_dense_layers = {layers} for no experts at all",
        )
    if not model.dense_hidden and (dense or model.moe_every > 1):
        yield Violation(
            ("model.dense_hidden", "model.num_dense_layers", "model.moe_every"),
            f"model.dense_hidden = 0, yet model.num_dense_layers = {model.num_dense_layers} and model.moe_every = "
            f"{model.moe_every} make {layers - moe_layers(model)} of {layers} blocks dense: set it, such as "
            f"dense_hidden = {4 * model.dim}",
        )
    if model.shared_gate and not model.shared_hidden:
        yield Violation(
            ("model.shared_gate", "model.shared_hidden"),
            "model.shared_gate = true gates a shared expert, but model.shared_hidden = 0 makes none: "
            f"set its width, such as shared_hidden = {model.expert_hidden}, or set shared_gate = false",
        )


def _window(model: Model) -> Iterator[Violation]:
    window, every = model.sliding_window, model.full_attention_every
    if window and every == 1:
        yield Violation(
            ("model.sliding_window", "model.full_attention_every"),
            f"model.sliding_window = {window} is not used with model.full_attention_every = 1, with which every block "
            "sees the full sequence: set full_attention_every = 2 for every other block or 0 for none, "
            "or sliding_window = 0",
        )


def _rope(model: Model) -> Iterator[Violation]:
    yarn, factor = model.rope_scaling == "yarn", model.rope_factor
    if yarn and factor == 1:
        yield Violation(
            ("model.rope_scaling", "model.rope_factor"),
            'model.rope_scaling = "yarn" stretches by model.rope_factor = 1, which does nothing: set it, such as '
            'rope_factor = 4.0, or set rope_scaling = "none"',
        )
    if not yarn and factor != 1:
        yield Violation(
            ("model.rope_scaling", "model.rope_factor"),
            f'model.rope_factor = {factor} is not used with model.rope_scaling = "{model.rope_scaling}": '
            'set rope_scaling = "yarn", or rope_factor = 1.0',
        )
    if yarn and model.rope_theta <= 1:
        yield Violation(
            ("model.rope_theta", "model.rope_scaling"),
            f"model.rope_theta = {model.rope_theta} gives no slow frequencies that yarn could stretch: "
            "use more than 1, such as the checkpoint's",
        )
    if yarn and model.rope_beta_fast < model.rope_beta_slow:
        yield Violation(
            ("model.rope_beta_fast", "model.rope_beta_slow"),
            f"model.rope_beta_fast = {model.rope_beta_fast} is below model.rope_beta_slow = {model.rope_beta_slow}: "
            "use the usual 32.0 and 1.0",
        )
    if bool(model.rope_mscale) != bool(model.rope_mscale_all_dim):
        yield Violation(
            ("model.rope_mscale", "model.rope_mscale_all_dim"),
            f"model.rope_mscale = {model.rope_mscale} and model.rope_mscale_all_dim = {model.rope_mscale_all_dim} are "
            "the two halves of one ratio: give both, or set both to 0.0",
        )


def _routing(model: Model) -> Iterator[Violation]:
    experts, top_k, groups = model.num_experts, model.top_k, model.num_groups
    if top_k > experts:
        yield Violation(
            ("model.top_k", "model.num_experts"),
            f"model.top_k = {top_k} exceeds model.num_experts = {experts}: a token visits an expert once, "
            f"use at most {experts}",
        )
    if experts % groups:
        yield Violation(
            ("model.num_experts", "model.num_groups"),
            f"model.num_experts = {experts} does not split into model.num_groups = {groups} equal groups "
            f"({experts} % {groups} = {experts % groups}): use num_groups "
            f"{nearest_values(divisors(experts), groups)}",
        )
    if model.top_groups > groups:
        yield Violation(
            ("model.top_groups", "model.num_groups"),
            f"model.top_groups = {model.top_groups} exceeds model.num_groups = {groups}: use at most {groups}",
        )
    elif experts % groups == 0 and top_k <= experts and model.top_groups * experts // groups < top_k:
        size = experts // groups
        yield Violation(
            ("model.top_groups", "model.num_groups", "model.num_experts", "model.top_k"),
            f"model.top_groups = {model.top_groups} of {groups} groups of {size} experts have "
            f"{model.top_groups * size}, fewer than model.top_k = {top_k}: use at least {-(-top_k // size)}",
        )


def _length(training: Training) -> Iterator[Violation]:
    steps, epochs, fields = training.steps, training.epochs, ("training.epochs", "training.steps")
    if epochs and steps != -1:
        yield Violation(
            fields,
            f"training.epochs = {epochs} and training.steps = {steps} both say how long the run is: leave one of them "
            "out, or set steps = -1 or epochs = 0",
        )
    if not epochs and steps == -1:
        yield Violation(
            fields,
            "training.steps = -1 is as many as training.epochs take, and training.epochs = 0: set either of them",
        )


def _precision(training: Training) -> Iterator[Violation]:
    stored, computed = training.dtype, training.mixed_precision_param
    if WIDTHS[computed] > WIDTHS[stored]:
        narrower = ", ".join(name for name, width in WIDTHS.items() if width <= WIDTHS[stored])
        yield Violation(
            ("training.mixed_precision_param", "training.dtype"),
            f'training.mixed_precision_param = "{computed}" is wider than training.dtype = "{stored}", in which '
            f'parameters are stored: use {narrower}, or dtype = "{computed}"',
        )


def _dropping(moe: MoE) -> Iterator[Violation]:
    if moe.pad_to_capacity and not moe.capacity_factor:
        yield Violation(
            ("moe.pad_to_capacity", "moe.capacity_factor"),
            "moe.pad_to_capacity = true pads expert buffers to a capacity, but moe.capacity_factor = 0 sets none: "
            "set one, such as capacity_factor = 1.25, or set pad_to_capacity = false",
        )


def _products(config: Config) -> Iterator[Violation]:
    """Yield contradictions of grouped_mm, expert_dtype and accumulate_weight_gradients with dtype, compile, lora."""
    moe, dtype = config.moe, config.training.mixed_precision_param
    if moe.grouped_mm == "grouped" and dtype == "float64":
        yield Violation(
            ("moe.grouped_mm", "training.mixed_precision_param"),
            'moe.grouped_mm = "grouped" has no float64: use "auto", which takes the loop there',
        )
    if moe.expert_dtype == "fp8" and dtype != "bfloat16":
        yield Violation(
            ("moe.expert_dtype", "training.mixed_precision_param"),
            f'moe.expert_dtype = "fp8" gives results in bfloat16, but training.mixed_precision_param = "{dtype}": use '
            '"bfloat16" there, or expert_dtype = "compute"',
        )
    if moe.expert_dtype == "fp8" and moe.grouped_mm == "loop":
        yield Violation(
            ("moe.expert_dtype", "moe.grouped_mm"),
            'moe.expert_dtype = "fp8" is a grouped product, and moe.grouped_mm = "loop" asks for none: use '
            'grouped_mm = "auto", or expert_dtype = "compute"',
        )
    if moe.accumulate_weight_gradients and config.compile.enable:
        yield Violation(
            ("moe.accumulate_weight_gradients", "compile.enable"),
            "moe.accumulate_weight_gradients = true adds gradients inside the products that compute them, which "
            "compile.enable = true leaves to the compiler: set one of them to false",
        )
    if moe.accumulate_weight_gradients and config.lora.rank:
        yield Violation(
            ("moe.accumulate_weight_gradients", "lora.rank"),
            f"moe.accumulate_weight_gradients = true is for gradients of the experts' own weights, and lora.rank = "
            f"{config.lora.rank} trains adapters alone: set it to false",
        )


def _profile(config: Config) -> Iterator[Violation]:
    profile, steps = config.profile, config.training.steps
    if late := [step for step in profile.steps if step > steps != -1]:
        yield Violation(
            ("profile.steps", "training.steps"),
            f"profile.steps has {late[0]}, and training.steps = {steps}: choose steps up to {steps}",
        )
    if profile.memory == "steps" and not profile.steps:
        yield Violation(
            ("profile.memory", "profile.steps"), 'profile.memory = "steps" needs profile.steps: list some, or use "oom"'
        )


def _best(config: Config) -> Iterator[Violation]:
    keep_best, validation = config.checkpoint.keep_best, config.validation
    metric = keep_best or "val_loss" * bool(config.training.stop_after)
    option = "checkpoint.keep_best" if keep_best else "training.stop_after"
    if not metric:
        return
    if keep_best and not config.checkpoint.enable:
        yield Violation(
            (option, "checkpoint.enable"),
            f'checkpoint.keep_best = "{keep_best}" keeps a checkpoint, and checkpoint.enable = false saves none: set '
            'enable = true, or keep_best = ""',
        )
    if metric.startswith("quiz."):
        tasks = [Path(path).stem for path in validation.quiz.paths]
        names = [f"quiz.{task}.{name}" for task in tasks for name in QUIZ_METRICS]
        if not validation.quiz.interval or metric not in names:
            metrics = f"the metrics are {', '.join(names)}" if names else "validation.quiz.paths is empty"
            yield Violation(
                (option, "validation.quiz.paths", "validation.quiz.interval"),
                f'checkpoint.keep_best = "{metric}" needs validation.quiz.interval above 0, and a metric of one of its '
                f"tasks: {metrics}",
            )
    elif metric == "val_reward":
        if not config.rl.eval_interval:
            yield Violation(
                (option, "rl.eval_interval"),
                f"{option} goes by val_reward, which nothing reports: set rl.eval_interval and rl.held_out",
            )
    elif not validation.interval:
        yield Violation(
            (option, "validation.interval"),
            f"{option} goes by {metric}, which no validation reports while validation.interval = 0: set it",
        )
    elif metric not in ("val_loss", "val_perplexity") and ".val_" not in metric:
        yield Violation(
            (option,),
            f'checkpoint.keep_best = "{metric}" is no metric of an evaluation: use val_loss, val_perplexity, one of '
            "the objective's such as preference.val_accuracy, or quiz.TASK.accuracy",
        )


def _checkpoint(checkpoint: Checkpoint) -> Iterator[Violation]:
    load = checkpoint.load
    if not load:
        yield Violation(("checkpoint.load",), 'checkpoint.load is empty: use "auto", "none", a step or a path')
    elif checkpoint.model_only and (load in ("auto", "none") or load.isdecimal()):
        yield Violation(
            ("checkpoint.model_only", "checkpoint.load"),
            f'checkpoint.model_only = true takes weights from a path, and checkpoint.load = "{load}" is not one: '
            "name another run's checkpoint, or set model_only = false",
        )
    if checkpoint.keep_every and not checkpoint.keep_last:
        yield Violation(
            ("checkpoint.keep_every", "checkpoint.keep_last"),
            f"checkpoint.keep_every = {checkpoint.keep_every} adds to what keep_last keeps, and keep_last = 0 keeps "
            "all: set keep_last, or keep_every = 0",
        )
