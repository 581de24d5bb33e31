"""The order in which a model is laid on the meshes."""

from __future__ import annotations

import torch

from titanmoe.config.schema import Config
from titanmoe.fold.meshes import Meshes
from titanmoe.fold.schedules import stage_ranks
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.attend import context_parallel
from titanmoe.parallel.compiled import compile_parts
from titanmoe.parallel.context import placement
from titanmoe.parallel.expert import expert_parallel
from titanmoe.parallel.materialize import materialize
from titanmoe.parallel.pipeline import Alone, Pipeline, split_layers
from titanmoe.parallel.recompute import recompute
from titanmoe.parallel.sharded import shard_data
from titanmoe.parallel.tensor import tensor_parallel


def build(config: Config, meshes: Meshes, microbatches: int, device: torch.device) -> list[Transformer]:
    """This rank's part of the model, ready to train: one transformer per stage it holds.

    Placements first, because FSDP shards what they leave; recomputation inside compilation inside FSDP, so that hooks
    which gather weights stay outside both; memory last, so that no rank ever holds more than its shards.
    """
    ranks = stage_ranks(config, meshes.pp.size)
    layers = split_layers(config.model, config.training.seq_len, len(ranks), config.pipeline.layers_per_stage)
    parts = []
    for stage in (stage for stage, rank in enumerate(ranks) if rank == meshes.pp.rank):
        with torch.device("meta"):
            first, last = stage == 0, stage == len(ranks) - 1
            dtype = getattr(torch, config.training.dtype)
            model = Transformer(config, microbatches, dtype, layers[stage], first, last)
        tensor_parallel(model, meshes.dense["tp"], meshes.tp)
        context_parallel(model, config.parallelism, placement(config), meshes.cp)
        expert_parallel(model, meshes)
        recompute(model, config.activation_checkpoint)
        compile_parts(model, config)
        shard_data(model, config, meshes)
        materialize(model, config.training.seed, device)
        parts.append(model)
    return parts


def drive(parts: list[Transformer], config: Config, meshes: Meshes, microbatches: int, device: torch.device):
    """What runs forward and backward through the parts; the step does not know whether there is a pipeline."""
    if meshes.pp.size == 1:
        return Alone(parts)
    return Pipeline(parts, config, meshes, microbatches, device)
