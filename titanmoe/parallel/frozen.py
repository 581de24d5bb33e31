"""Weights that are not trained: without a gradient, and as narrow as they are computed with.

FSDP asks only the trained parameters of a unit to have one dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from titanmoe.config.schema import Config
from titanmoe.models.tensors import Tuning, stored_name
from titanmoe.models.transformer import Transformer


def held_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """Of a frozen weight. A router computes in float32 at least."""
    return torch.promote_types(compute, torch.float32) if ".router." in name else compute


def freeze(model: Transformer, config: Config) -> None:
    """Replaces the (meta) parameters that the recipe freezes."""
    tuning = Tuning.of(config)
    compute = getattr(torch, config.training.mixed_precision_param)
    for name, parameter in list(model.named_parameters()):
        if not tuning.freezes(stored_name(name, config.model.tie_embeddings)):
            continue
        path, _, last = name.rpartition(".")
        frozen = nn.Parameter(torch.empty_like(parameter, dtype=held_dtype(name, compute)), requires_grad=False)
        setattr(model.get_submodule(path), last, frozen)
    model.tie()
