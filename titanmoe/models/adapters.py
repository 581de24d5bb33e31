"""Low-rank adapters on a model's frozen matrices: y = W x + alpha / r * B A x (arXiv 2106.09685).

B begins as zeros, so a model with new adapters computes what it did without them. Where tp or etp divides W's outputs,
B is divided and every rank has A; where it divides the inputs, A is divided and every rank has B, on its own summand of
A x. What every rank has gets a summand of its gradient there: `titanmoe.parallel.tensor.sum_replicated` adds them up.
"""

from __future__ import annotations

import torch
from torch import nn

from titanmoe.config.schema import Config
from titanmoe.models import tensors
from titanmoe.models.transformer import Transformer


def add_adapters(model: Transformer, config: Config) -> None:
    """To a model on meta that tp and ep have not divided yet."""
    tuning, alpha = tensors.Tuning.of(config), config.lora.alpha
    for name, parameter in list(model.named_parameters()):
        if not (rank := tuning.rank_of(name)):
            continue
        *experts, outputs, inputs = parameter.shape
        shapes = (*experts, rank, inputs), (*experts, outputs, rank)
        for adapter, shape in zip(tensors.adapter_names(name), shapes, strict=True):
            path, _, last = adapter.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(torch.empty(shape, dtype=model.dtype)))
        model.get_submodule(path).lora_scale = alpha / rank
