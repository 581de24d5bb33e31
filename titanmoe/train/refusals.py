"""Checks a recipe (`refusals`) and a run's inputs (`check_inputs_and_resolve`) before the first process group exists.

The laws are in `titanmoe.config.laws` (fields) and `titanmoe.fold.legality` (mappings). This module adds what this
machine or its PyTorch lacks, the files that a run reads, and the disk space for its checkpoints.

`titanmoe train` checks inputs before it starts ranks; under torchrun rank 0 does so before it joins the others. A
missing file is then reported before every rank has loaded PyTorch. Each rank still checks the files when it reads them,
because another machine may see other files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from titanmoe.checkpoint import layout
from titanmoe.checkpoint.choose_checkpoint import StartPoint, base_weights_name, choose_start, run_folder
from titanmoe.checkpoint.manifest import flatten_record
from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config import ConfigError
from titanmoe.config.fields import to_tables
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import resolve_degrees
from titanmoe.fold.legality import violations
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.train.find_teacher import teacher_problems
from titanmoe.train.launch_messages import show_status
from titanmoe.train.runtime import read_environment


def refusals(config: Config, world: int) -> list[str]:
    """Return one message for each law that the config breaks on `world` ranks and each thing that this machine lacks.

    [] if none. Files and disk space are not checked, but the teacher's config is.
    """
    on_machine = _with_machine(config)
    return [*violations(on_machine, world), *teacher_problems(on_machine, world), *machine_problems(config, world)]


def ranks_per_node(config: Config) -> int:
    """Return the number of ranks per machine: parallelism.node, or if that is not set LOCAL_WORLD_SIZE."""
    ranks = config.parallelism.node
    return read_environment().local_world if ranks == -1 else ranks


def _with_machine(config: Config) -> Config:
    """Return the config with the ranks per machine, and without a GPU on this machine with any device made "cpu"."""
    device = config.training.device if config.training.device == "cpu" or _has_gpu() else "cpu"
    return replace(
        config,
        parallelism=replace(config.parallelism, node=ranks_per_node(config)),
        training=replace(config.training, device=device),
    )


def _has_gpu() -> bool:
    from titanmoe.ops.device import kind_of_setting  # imports torch

    return kind_of_setting("auto") == "cuda"


def machine_problems(config: Config, world: int) -> Iterator[str]:
    """Yield a message for each thing that the recipe asks for and this machine, its PyTorch or its packages lack.

    Args:
        world: number of ranks, from which degrees that are left open follow.
    """
    moe, options, training = config.moe, config.parallelism, config.training
    degrees, _ = resolve_degrees(world, options)
    on_gpu = training.device != "cpu" and _has_gpu()
    if DISPATCHERS.look_up(moe.dispatcher).asks_machine and degrees.get("ep", 1) * degrees.get("etp", 1) > 1:
        dispatcher = DISPATCHERS.implementation(moe.dispatcher)
        if lack := dispatcher.missing(training.device):
            yield f'moe.dispatcher = "{moe.dispatcher}" cannot run here: {lack}; use dispatcher = "alltoall"'
    if moe.kernels == "triton":
        from titanmoe.ops import kernels

        if lack := kernels.missing(on_gpu):
            yield f'moe.kernels = "triton", but {lack}: use "auto", which uses them where they can run, or "torch"'
    if moe.expert_dtype == "fp8":
        from titanmoe.moe import fp8

        if lack := fp8.missing(on_gpu):
            yield (
                f'moe.expert_dtype = "fp8" needs 8-bit products, but {lack}: use expert_dtype = "compute", or '
                '"fp8_emulated" to see the effect of its rounding'
            )
    if options.attention_backend == "torch" and options.cp_kind == "ring" and degrees.get("cp", 1) > 1:
        from titanmoe.parallel import torch_ring

        if lack := torch_ring.missing():
            yield f'parallelism.attention_backend = "torch" cannot be used here: {lack}; use "auto"'
    if options.attention_kernel != "auto":
        from titanmoe.parallel import attention_kernel

        lack = attention_kernel.missing(options.attention_kernel, config.model.head_dim)
        if lack := lack if on_gpu else "it runs on GPUs, and this run is on CPUs":
            yield f'parallelism.attention_kernel = "{options.attention_kernel}" cannot be used here: {lack}; use "auto"'
    package = find_spec("wandb") if config.metrics.wandb else None
    if config.metrics.wandb and (package is None or package.origin is None):  # a mere folder of that name has no origin
        name = config.metrics.wandb
        yield f'metrics.wandb = "{name}" needs a package: pip install "titanmoe[wandb]", or leave it empty'
    if config.profile.memory != "none" and not on_gpu:
        yield (
            f'profile.memory = "{config.profile.memory}" records the memory of GPUs, and this run has none: use "none"'
        )


T = TypeVar("T")


class CollectedErrors:
    """Errors of several checks, collected so that they are raised together."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    def collect(self, check: Callable[[], T]) -> T | None:
        """Call a check and return its result; store a ConfigError or CheckpointError that it raises, return None."""
        try:
            return check()
        except ConfigError as error:
            self.errors.append(error)
        except CheckpointError as error:
            self.errors.append(ConfigError(str(error)))
        return None

    def raise_together(self) -> None:
        """Raise a ConfigError with the problems of all collected errors; do nothing if there are none."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            named = [(f"{error.source}: " if error.source else "", error.problems) for error in self.errors]
            raise ConfigError([source + problem for source, problems in named for problem in problems])


def check_inputs_and_resolve(
    config: Config, resolve: Callable[[Config], Config], checked: Config | None = None
) -> Config:
    """Check the files that a run reads and the space on its disk; return the resolved config.

    Inputs are checked first, because resolving a config with training.epochs tokenizes the data; then what components
    check of the resolved config; then the disk. A Hugging Face model to begin from is fetched. With rl.reward, [data]
    is not checked. Not collective: one process checks for all.

    Args:
        config: the config, fitted to the number of ranks.
        resolve: fills in derived fields.
        checked: the config to check, without inputs that are not used, as in `titanmoe score`; None for `config`.

    Raises:
        ConfigError: with every problem of the first of these checks that finds one.
    """
    checked = checked or config
    show_status("checking what the run reads")
    collected = CollectedErrors()
    start, record = collected.collect(lambda: _choose_start(checked)) or (None, {})
    goes_on = record and start and not start.model_only
    if not checked.rl.reward:
        collected.collect(lambda: _check_data(checked, record.get("loader") if goes_on else None))
    if start is not None:
        collected.collect(lambda: _check_first_weights(checked, start, record))
    collected.raise_together()
    resolved = resolve(config)
    for check in config.components.input_checks:
        collected.collect(partial(check, resolved))
    collected.raise_together()
    if checked.checkpoint.enable:
        from titanmoe.train.host_resources import disk_shortage

        if shortage := disk_shortage(resolved, record["step"] if goes_on else 0):
            raise ConfigError(shortage)
    return resolved


def _check_data(config: Config, state: Any) -> None:
    from titanmoe.data.check_data import check_data  # imports torch

    check_data(config, state)


def _choose_start(config: Config) -> tuple[StartPoint, dict[str, Any]]:
    """Return where the run starts, and what that checkpoint records besides tensors ({} without a checkpoint).

    Of its files only presence and size are checked, not the checksums.

    Raises:
        ConfigError: if the run cannot start from this checkpoint.
    """
    from titanmoe.checkpoint.state import refused_record

    options = config.checkpoint
    start = choose_start(options, run_folder(config.job), lambda path: layout.find_damage(path, contents=False))
    if start.path is None:
        return start, {}
    record, now = layout.read_manifest(start.path).record, flatten_record(to_tables(config))
    adapters = config.lora.rank > 0
    if problems := refused_record(record, now, start.path, adapters, start.model_only, options.initial_adapter):
        raise ConfigError(problems, str(start.path))
    return start, record


def _check_first_weights(config: Config, start: StartPoint, record: dict[str, Any]) -> None:
    """Raise a ConfigError if the Hugging Face model or PEFT adapters that the run begins from cannot be used.

    Nothing is checked if this start does not read them. A model on the hub is fetched.

    Args:
        start: the checkpoint that the run starts from, if any.
        record: what that checkpoint records besides tensors.
    """
    options, collected = config.checkpoint, CollectedErrors()
    if options.initial_hf and (start.path is None or (config.lora.rank and "base" in record)):
        collected.collect(lambda: _check_model(config))
    if options.initial_adapter and (start.path is None or start.model_only):
        collected.collect(lambda: _check_adapter(config))
    collected.raise_together()


def _check_model(config: Config) -> None:
    from titanmoe.checkpoint.hf.fetch import is_remote, weights_folder
    from titanmoe.checkpoint.hf.huggingface_source import open_checked_hf
    from titanmoe.checkpoint.hf.safetensors_folder import config_and_tokenizer_files

    name = config.checkpoint.initial_hf
    if is_remote(name):
        show_status(f"fetching {name}")
    folder = weights_folder(name)
    open_checked_hf(folder, config.model)
    if config.checkpoint.enable:
        config_and_tokenizer_files(folder)


def _check_adapter(config: Config) -> None:
    from titanmoe.checkpoint.hf.peft_base import read_first_adapters, refuse_other_base

    adapters = read_first_adapters(Path(config.checkpoint.initial_adapter), config.model, config.lora)
    refuse_other_base(adapters, base_weights_name(config.checkpoint))
