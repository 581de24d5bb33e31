"""Freeze the weights that a recipe does not train: no gradient, and stored in the dtype that they are computed in.

FSDP asks only the trained parameters of a unit to have one dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from titanmoe.config.schema import Config
from titanmoe.models.tensors import Tuning, stored_name
from titanmoe.models.transformer import Transformer


def frozen_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """Return the dtype in which a frozen weight is stored. A router computes in float32 at least.

    Args:
        compute: training.mixed_precision_param, the dtype that layers compute in.
    """
    return torch.promote_types(compute, torch.float32) if ".router." in name else compute


def freeze(model: Transformer, config: Config) -> None:
    """Replace the parameters that the recipe freezes by ones without gradient, in place; then tie embeddings again.

    The model is on meta. The new parameters are stored in the dtype that they are computed in.
    """
    tuning = Tuning.of(config)
    compute = getattr(torch, config.training.mixed_precision_param)
    for name, parameter in list(model.named_parameters()):
        if not tuning.freezes(stored_name(name, config.model.tie_embeddings)):
            continue
        path, _, last = name.rpartition(".")
        frozen = nn.Parameter(torch.empty_like(parameter, dtype=frozen_dtype(name, compute)), requires_grad=False)
        setattr(model.get_submodule(path), last, frozen)
    model.tie()
