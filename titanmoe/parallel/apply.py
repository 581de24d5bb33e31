"""Build this rank's stages of a model, with every kind of parallelism applied in the right order.

`titanmoe.train.build` calls the three functions: `make_meshes`, then `build`, then `make_engine`, whose `run` is the
forward and backward of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.meshes import Meshes, build_meshes
from titanmoe.fold.pipeline_schedules import splits_backward, stage_ranks
from titanmoe.models.lora import add_adapters
from titanmoe.models.stages import split_layers
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import LOSS_ONLY, HeadOptions
from titanmoe.models.vocabulary_shards import VocabularyShards
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.parallel.choose_attention import apply_context_parallel
from titanmoe.parallel.compiled import compile_model, why_not_one_graph
from titanmoe.parallel.data_parallel import apply_fsdp, apply_fsdp_to_vocabulary
from titanmoe.parallel.expert import apply_expert_parallel
from titanmoe.parallel.flex import flex
from titanmoe.parallel.frozen import freeze
from titanmoe.parallel.materialize import materialize
from titanmoe.parallel.parallel_plan import make_plan, parallelize, vocabulary_plan
from titanmoe.parallel.pipeline import Pipeline, WithoutPipeline
from titanmoe.parallel.recompute import apply_recomputation
from titanmoe.parallel.unsharded import UnshardedExperts


def make_meshes(fold: Fold, config: Config, device: torch.device) -> Meshes:
    """Return the process groups and meshes of a run. Collective over the world.

    Groups within and across nodes are made only for dispatchers that work by node, those of etp alone only for LoRA.
    """
    return build_meshes(
        fold,
        device.type,
        config.parallelism.node if DISPATCHERS.look_up(config.moe.dispatcher).works_by_node else -1,
        timedelta(seconds=config.training.first_step_timeout_s),
        etp=config.lora.rank > 0,
        vocabulary=config.parallelism.vocab == "pipeline",
    )


def build(
    config: Config,
    meshes: Meshes,
    microbatches: int,
    device: torch.device,
    materialize: Callable[[Transformer, int, torch.device], None] = materialize,
    flex: Callable[..., torch.Tensor] = flex,
    head_options: HeadOptions = LOSS_ONLY,
) -> list[Transformer]:
    """Return this rank's stages of the model, ready to train: one transformer per stage, in the order of stages.

    If all stages share the embedding and the head (parallelism.vocab = "pipeline"), this rank's rows of these, a
    `VocabularyShards`, are last in the list.

    Tensor, context and expert parallelism come first, because FSDP shards what they leave on a rank. Compilation and
    recomputation go inside FSDP, so that the hooks that gather weights stay outside. Memory is allocated last, so that
    no rank ever allocates more than its shards. No communication; this process switches to the attention kernel of the
    recipe.

    Args:
        materialize: allocates and initialises a stage, given (stage, training.seed, device).
        flex: computes attention in place of `titanmoe.parallel.flex.flex`, with its arguments.
        head_options: what the head of the last stage returns.

    Raises:
        ConfigError: if the head is to return top-k ids, and all stages share it.
    """
    ranks, splits = stage_ranks(config.pipeline, meshes.pp.size), splits_backward(config.pipeline, meshes.pp.size)
    shared = config.parallelism.vocab == "pipeline"
    explicit = config.pipeline.layers_per_stage
    layers = split_layers(config.model, config.training.seq_len, len(ranks), explicit, shared)
    stored = getattr(torch, config.training.dtype)
    stages = []
    for number in (number for number, rank in enumerate(ranks) if rank == meshes.pp.rank):
        with torch.device("meta"):
            first, last = number == 0, number == len(ranks) - 1
            model = Transformer(
                config, microbatches, stored, layers=layers[number], first=first, last=last, head_options=head_options
            )
            add_adapters(model, config, meshes.tp.rank)
        freeze(model, config)
        parallelize(model, make_plan(config, layers[number], first, last), meshes)
        apply_context_parallel(model, config.parallelism, meshes.cp, flex)
        apply_expert_parallel(model, meshes)
        compile_model(model, config, splits)
        apply_recomputation(
            model, config.activation_checkpoint, config.compile.enable and not why_not_one_graph(config, splits)
        )
        apply_fsdp(model, config.training, config.parallelism, meshes)
        materialize(model, config.training.seed, device)
        stages.append(model)
    if shared:
        if head_options.top_k:
            raise ConfigError('a teacher\'s top-k ids need parallelism.vocab = "tensor"')
        with torch.device("meta"):
            shards = VocabularyShards(config, stored, head_options)
        freeze(shards, config)
        parallelize(shards, vocabulary_plan(), meshes)
        shards.embed.tp = shards.head.tp = meshes.tp
        compile_model(shards, config, splits)
        apply_fsdp_to_vocabulary(shards, config.training, meshes)
        materialize(shards, config.training.seed, device)
        stages.append(shards)
    return stages


def make_engine(
    stages: list[Transformer], config: Config, meshes: Meshes, microbatches: int, device: torch.device
) -> WithoutPipeline | Pipeline:
    """Return the object whose `run` runs forward and backward of a step through the stages that `build` returned.

    Collective over the world if there is a pipeline.
    """
    reduce_once, shards = config.parallelism.reduce_once, None
    if config.parallelism.vocab == "pipeline":
        *stages, shards = stages
    summed_before = meshes.pp.size > 1 or reduce_once
    experts = [UnshardedExperts(stage, config.training, meshes, summed_before) for stage in stages]
    if meshes.pp.size == 1:
        return WithoutPipeline(stages[0], experts[0], reduce_once)
    return Pipeline(
        stages, experts, config=config, meshes=meshes, microbatches=microbatches, device=device, shards=shards
    )
