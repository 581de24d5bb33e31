"""Checkpoints of random adapters on a small model of transformers, as a run leaves them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.hf.weight_sources import open_weights
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.weight_digest import frozen_digest
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.config.fields import to_tables
from titanmoe.config.schema import Checkpoint, Config, LoRA, Model, Training
from titanmoe.models import tensors as names
from titanmoe.models.lora_spec import is_adapter
from titanmoe.ops import counter_rng

LORA = LoRA(rank=6, experts_rank=3, alpha=7.0)


def random_adapters(model: Model, lora: LoRA) -> dict[str, Tensor]:
    shapes = names.shapes(model, names.Tuning.of(Config(model=model, lora=lora)))
    return {
        name: 0.1 * counter_rng.normal(counter_rng.key(name), torch.arange(torch.Size(shape).numel())).view(shape)
        for name, shape in shapes
        if is_adapter(name)
    }


def write(
    path: Path, folder: Path, lora: LoRA = LORA, initial_hf: str | None = None, param: str = "float32"
) -> dict[str, Tensor]:
    """The adapters of a new checkpoint on a Hugging Face folder, in float32. initial_hf: what its recipe says instead
    of that. param: the dtype it computed in."""
    under = open_weights(str(folder))
    whole = {name: under.read(name, (0,) * len(shape), shape) for name, (shape, _) in under.tensors.items()}
    frozen = {name: nn.Parameter(tensor) for name, tensor in whole.items() if not name.endswith("expert_bias")}
    training = Training(mixed_precision_param=param, seq_len=32)
    begin = Checkpoint(initial_hf=str(folder) if initial_hf is None else initial_hf)
    config = Config(model=under.model, lora=lora, training=training, checkpoint=begin)
    adapters = random_adapters(under.model, lora)
    tensors = {
        f"model.{n}": LazyTensor(tuple(x.shape), x.dtype, slice_of_full(lambda x=x: x)) for n, x in adapters.items()
    }
    write_checkpoint(
        path, tensors, {"step": 1, "tokens": 32, "config": to_tables(config), "base": frozen_digest(frozen, None)}
    )
    return adapters
