"""Everything that can be refused before the first process group exists, in one list.

The laws are in `titanmoe.config.laws`, for fields, and `titanmoe.fold.legality`, for mappings. This module adds what
this machine cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import resolve
from titanmoe.fold.legality import violations
from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.train.find_teacher import problems_of_teacher
from titanmoe.train.runtime import read_environment


def refusals(config: Config, world: int) -> list[str]:
    here = _here(config)
    return [*violations(here, world), *problems_of_teacher(here, world), *lacking(config, world)]


def ranks_of_a_node(config: Config) -> int:
    ranks = config.parallelism.node
    return read_environment().local_world if ranks == -1 else ranks


def _here(config: Config) -> Config:
    """Fills in what only this machine knows: how many of the ranks are on it, and whether they have GPUs."""
    device = config.training.device if config.training.device == "cpu" or _has_gpu() else "cpu"
    return replace(
        config,
        parallelism=replace(config.parallelism, node=ranks_of_a_node(config)),
        training=replace(config.training, device=device),
    )


def _has_gpu() -> bool:
    from titanmoe.ops.device import kind_for  # imports torch

    return kind_for("auto") == "cuda"


def lacking(config: Config, world: int) -> Iterator[str]:
    """What the recipe asks for and this machine, or its PyTorch, does not have."""
    moe, options, training = config.moe, config.parallelism, config.training
    degrees, _ = resolve(world, options)
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
