"""Building and loading of the model to generate with on this rank, from what titanmoe.generate.model has found.

Weights are not sharded over data ranks and stored in the compute dtype, so that nothing is gathered per token. A model
that does not fit a device is sharded by tp, ep and etp.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanmoe.checkpoint import state
from titanmoe.checkpoint.full_model import fill_shards
from titanmoe.checkpoint.hf.peft_base import compare_base
from titanmoe.checkpoint.hf.weight_sources import check_digest, open_weights
from titanmoe.checkpoint.move_in_blocks import fill_in_blocks
from titanmoe.checkpoint.state import Targets
from titanmoe.config.schema import Config
from titanmoe.data.tokenizer import Tokenizer
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import Meshes, build_meshes
from titanmoe.generate.loop import Generator
from titanmoe.generate.model import TrainedModel
from titanmoe.models.lora import add_adapters
from titanmoe.models.lora_spec import is_adapter
from titanmoe.models.transformer import Transformer
from titanmoe.parallel.choose_attention import apply_context_parallel
from titanmoe.parallel.expert import apply_expert_parallel
from titanmoe.parallel.parallel_plan import make_plan, parallelize
from titanmoe.this_process import is_rank_0
from titanmoe.train.runtime import Runtime


def open_generator(
    config: Config, trained: TrainedModel, runtime: Runtime, tokenizer: Tokenizer, ends: set[int | None]
) -> Generator:
    """Build and load the model on this rank; return what generates with it. Collective over the world.

    Args:
        config: the config from `model.config_to_run`.
        trained: the model to load.
        runtime: this process.
        tokenizer: the tokenizer, beyond whose vocabulary no token is generated.
        ends: tokens that end a text.

    Raises:
        ConfigError: adapters were trained on other weights.
    """
    meshes = build_meshes(derive(runtime.world, config.parallelism), runtime.device.type, trains=False)
    model = build(config, meshes, trained, runtime.device)
    return Generator(model, meshes, runtime.device, tokenizer.vocab_size, ends)


def build(config: Config, meshes: Meshes, trained: TrainedModel, device: torch.device) -> Transformer:
    """Build the transformer on this rank, in eval mode, with its shards loaded and no gradients.

    Collective over the world. `config` is from `model.config_to_run`, `meshes` are those of its mapping.

    Raises:
        ConfigError: adapters were trained on other weights.
    """
    model, targets = build_empty(config, meshes, device)
    if trained.adapters:
        _check_base_weights(trained)
        for name in filter(is_adapter, list(targets)):
            shard = targets.pop(name)[1]
            fill_in_blocks(shard.tensor, shard.offset, trained.adapters.tensors[name.removeprefix("model.")].read)
    fill_shards(targets, trained, config.model)
    return model


def build_empty(config: Config, meshes: Meshes, device: torch.device) -> tuple[Transformer, Targets]:
    """Build the transformer on this rank without gradients; return it, in eval mode, and its shards by name.

    The shards are allocated on `device` and not filled yet. Who fills them fills the weights: they share memory.
    Parameters are plain tensors, not DTensors; buffers are 0. No communication.
    """
    with torch.device("meta"):
        model = Transformer(config, 1, getattr(torch, config.training.dtype))
        add_adapters(model, config)
    parallelize(model, make_plan(config, range(config.model.num_layers)), meshes)
    # Prompts have many lengths, and torch's flex_attention would compile for each.
    options = replace(config.parallelism, attention_backend="plain")
    apply_context_parallel(model, options, meshes.cp)
    apply_expert_parallel(model, meshes)
    model.to_empty(device=device)
    model.tie()
    for buffer in model.buffers():
        buffer.zero_()
    tied = config.model.tie_embeddings
    targets = state.shards_to_load(dict(model.named_parameters()), state.persistent_buffers(model), None, tied)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # A forward uses the local shard only.
            plain = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            setattr(module, name, nn.Parameter(plain, requires_grad=False))
    model.tie()
    return model.eval(), targets


def _check_base_weights(trained: TrainedModel) -> None:
    """Raise a ConfigError unless the weights are those that the adapters were trained on. Collective over the world.

    Digests are compared if the adapters have one; else names, shapes and, where possible, weights, and rank 0 prints a
    note on what was compared.
    """
    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    weights = open_weights(str(trained.path), trained.adapters.model)
    check_digest(trained.adapters, weights, str(trained.path), group)
    if trained.adapters.config is None:
        compared = compare_base(trained.adapters, weights, trained.base_name, group)
        if is_rank_0():
            print(f"note: {compared}", file=sys.stderr)
