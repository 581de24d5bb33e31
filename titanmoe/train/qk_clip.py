"""QK-Clip (arXiv 2507.20534, section 2.1): scales down query and key weights after a step with too large logits.

A head whose largest logit m exceeds the limit is scaled by eta = limit / m. Query heads that share a key head use the
largest m among them. Query and key weights of one head are each multiplied by sqrt(eta). In latent attention the RoPE
rows of the queries are multiplied by eta, because all heads share the RoPE key.

Shapes: L blocks of the model, H query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Model
from titanmoe.models import tensors
from titanmoe.models.families import mixers
from titanmoe.parallel.materialize import local_shard


class QKClip:
    """QK-Clip of a run (optimizer.qk_clip): called after a step, it scales this rank's query and key weights."""

    def __init__(self, limit: float, model: Model, parameters: dict[str, nn.Parameter]):
        self.limit = limit
        self.targets = [
            (layer, rows, parameters[name])
            for layer, mixer in enumerate(mixers(model))
            for leaf, rows in mixer.qk_clip_rows(model).items()
            if (name := f"{tensors.block_name(model, layer)}.attention.{leaf}") in parameters
        ]

    @torch.no_grad()
    def __call__(self, largest_LH: Tensor) -> None:
        """Scale the query and key weights of each head whose largest logit exceeds the limit, in place.

        Args:
            largest_LH: largest attention logit of the step, of each block of the model and query head, over all ranks.
        """
        for layer, rows, parameter in self.targets:
            # Query heads that share a key head are neighbours.
            largest = largest_LH[layer].view(rows.key_heads, -1).amax(1)
            eta = (self.limit / largest).where(largest > self.limit, 1.0)
            eta = eta.repeat_interleave(rows.heads // rows.key_heads)
            factors = [(eta**power).unsqueeze(1).expand(-1, count) for count, power in rows.parts]
            shard, offset = local_shard(parameter.detach())
            factor = torch.cat(factors, 1).flatten()[offset[0] : offset[0] + shard.shape[0]]
            shard.mul_(factor.to(shard.dtype).view(-1, *[1] * (shard.dim() - 1)))
