"""QK-Clip: weights of queries and keys are scaled down after a step in which a logit was above a limit.

arXiv 2507.20534, section 2.1. A head with largest logit m > limit gets eta = limit / m. Query heads that share a key
head share the largest m. What a query or a key is made of alone has the root of eta; the part of latent attention's
queries that RoPE turns has all of it, because the key's turned part is every head's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Model
from titanmoe.models import tensors
from titanmoe.models.families import mixers
from titanmoe.models.mixers.mixer_spec import ClippedRows
from titanmoe.parallel.materialize import piece


class Target(NamedTuple):
    layer: int
    rows: ClippedRows
    parameter: nn.Parameter


class QKClip:
    def __init__(self, limit: float, model: Model, parameters: dict[str, nn.Parameter]):
        self.limit = limit
        self.targets = [
            Target(layer, rows, parameters[name])
            for layer, mixer in enumerate(mixers(model))
            for leaf, rows in mixer.clipped(model).items()
            if (name := f"{tensors.block_name(model, layer)}.attention.{leaf}") in parameters
        ]

    @torch.no_grad()
    def __call__(self, largest_LH: Tensor) -> None:
        for layer, rows, parameter in self.targets:
            # Query heads that share a key head are neighbours.
            largest = largest_LH[layer].view(rows.key_heads, -1).amax(1)
            eta = (self.limit / largest).where(largest > self.limit, 1.0)
            eta = eta.repeat_interleave(rows.heads // rows.key_heads)
            factors = [(eta**power).unsqueeze(1).expand(-1, count) for count, power in rows.parts]
            part, offset = piece(parameter.detach())
            own = torch.cat(factors, 1).flatten()[offset[0] : offset[0] + part.shape[0]]
            part.mul_(own.to(part.dtype).view(-1, *[1] * (part.dim() - 1)))
