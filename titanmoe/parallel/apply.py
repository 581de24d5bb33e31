"""Parallelises a model: applies each kind of parallelism to it, in the right order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from titanmoe.config.schema import Config, Parallelism, Training
from titanmoe.config.schema import MoE as MoEOptions
from titanmoe.config.schema import Pipeline as PipelineOptions
from titanmoe.fold.degrees import Fold
from titanmoe.fold.meshes import Meshes, build_meshes
from titanmoe.fold.pipeline_schedules import splits_backward, stage_ranks
from titanmoe.fold.unsharded_experts import reshards_after_forward
from titanmoe.models.lora import add_adapters
from titanmoe.models.stages import split_layers
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import LOSS_ONLY, HeadOutput
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.parallel.attend import context_parallel
from titanmoe.parallel.compiled import compile_parts, why_in_parts
from titanmoe.parallel.context import placement
from titanmoe.parallel.expert import expert_parallel
from titanmoe.parallel.flex import flex
from titanmoe.parallel.frozen import freeze
from titanmoe.parallel.materialize import materialize
from titanmoe.parallel.pipeline import Pipeline, WithoutPipeline
from titanmoe.parallel.recompute import recompute
from titanmoe.parallel.sharded import shard_data
from titanmoe.parallel.tensor import make_plan, parallelize
from titanmoe.parallel.unsharded import UnshardedExperts


def make_meshes(
    fold: Fold,
    *,
    parallelism: Parallelism,
    moe: MoEOptions,
    training: Training,
    device: torch.device,
    adapters: bool = False,
) -> Meshes:
    """The process groups and meshes of a run. Collective over the world."""
    node = parallelism.node if DISPATCHERS.look_up(moe.dispatcher).works_by_node else -1
    timeout = timedelta(seconds=training.first_step_timeout_s)
    return build_meshes(fold, device.type, node, timeout, etp=adapters)


def build(
    config: Config,
    meshes: Meshes,
    microbatches: int,
    device: torch.device,
    materialize: Callable[[Transformer, int, torch.device], None] = materialize,
    flex: Callable = flex,
    output: HeadOutput = LOSS_ONLY,
) -> list[Transformer]:
    """This rank's stages of the model, ready to train: a transformer each.

    Tensor, context and expert parallelism come first, because FSDP shards what they leave on a rank; compilation and
    recomputation go inside FSDP, so that the hooks that gather weights stay outside; memory is allocated last, so that
    no rank ever allocates more than its shards.

    materialize: allocates and fills a stage. flex: as in `titanmoe.parallel.flex`. output: of the last stage's head.
    """
    ranks, splits = stage_ranks(config.pipeline, meshes.pp.size), splits_backward(config.pipeline, meshes.pp.size)
    layers = split_layers(config.model, config.training.seq_len, len(ranks), config.pipeline.layers_per_stage)
    stored = getattr(torch, config.training.dtype)
    stages = []
    for number in (number for number, rank in enumerate(ranks) if rank == meshes.pp.rank):
        with torch.device("meta"):
            first, last = number == 0, number == len(ranks) - 1
            model = Transformer(config, microbatches, stored, layers[number], first, last, output)
            add_adapters(model, config)
        freeze(model, config)
        parallelize(model, make_plan(config, layers[number], first, last), meshes)
        context_parallel(model, config.parallelism, placement(config.parallelism), meshes.cp, flex)
        expert_parallel(model, meshes)
        compile_parts(model, config, splits)
        recompute(model, config.activation_checkpoint, config.compile.enable and not why_in_parts(config, splits))
        shard_data(model, config.training, config.parallelism, meshes)
        materialize(model, config.training.seed, device)
        stages.append(model)
    return stages


def make_engine(
    stages: list[Transformer],
    *,
    pipeline: PipelineOptions,
    parallelism: Parallelism,
    training: Training,
    meshes: Meshes,
    microbatches: int,
    device: torch.device,
    in_pairs: bool = False,
) -> WithoutPipeline | Pipeline:
    """Return what runs forward and backward through the stages; the training step need not know whether there is a
    pipeline. in_pairs: whether pairs of forward and backward take turns, as by moe.overlap = "pairs"."""
    summed_before = meshes.pp.size > 1 or parallelism.reduce_once
    experts = [UnshardedExperts(stage, training, meshes, summed_before) for stage in stages]
    if meshes.pp.size == 1:
        return WithoutPipeline(stages, experts, parallelism.reduce_once)
    keep_gathered = not reshards_after_forward(parallelism)
    return Pipeline(stages, experts, pipeline, training, meshes, microbatches, device, keep_gathered, in_pairs)
