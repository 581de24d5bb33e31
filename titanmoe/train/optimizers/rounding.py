"""Numbers that are kept in bfloat16 and changed in float32, and how they are rounded back.

A change of a weight below 1 / 512 of it is lost when it is rounded to the nearest bfloat16: with a decay of 0.1 and a
rate of 1e-3 nothing decays. Rounded at random, up as often as it is near, the mean of many changes is right. The random
numbers are counted: a function of the seed, the update, the tensor and the element's place in the whole of it, so that
every mapping and a resumed run round alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Config
from titanmoe.models.tensors import stored_name
from titanmoe.ops import counter_rng
from titanmoe.parallel.materialize import blocks_of, piece


def widened(x: Tensor) -> Tensor:
    """To change it; itself if it is wide enough."""
    return x.float() if x.dtype == torch.bfloat16 else x


def at_random(x: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16: away from zero with the probability that the cut bits stand for."""
    mantissa = x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (mantissa & -0x10000).view(torch.float32).where(x.isfinite(), x).to(torch.bfloat16)


class Rounding:
    def __init__(self, parameters: Mapping[str, nn.Parameter], seed: int | None = None, tied: bool = False):
        """seed: None to round to the nearest. tied: whether the head is the embedding."""
        self.seed, self.update = seed, 0
        self.names = {name: stored_name(name, tied) for name in parameters}
        self.places = {name: (piece(p.detach())[1], p.shape) for name, p in parameters.items()}

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], config: Config) -> Rounding:
        seed = config.training.seed if config.optimizer.stochastic_rounding else None
        return cls(parameters, seed, config.model.tie_embeddings)

    def store(self, target: Tensor, value: Tensor, name: str, what: str) -> None:
        """what: which of a parameter's tensors it is. Nothing is to do if the value is the target itself."""
        if value is target:
            return
        if self.seed is None:
            target.copy_(value)
            return
        key, done = counter_rng.key("rounding", self.seed, self.update, self.names[name], what), 0
        for rows, index in blocks_of(target, *self.places[name]):
            random = counter_rng.bits(key, index) >> 48
            rows.copy_(at_random(value[done : done + len(rows)].contiguous(), random))
            done += len(rows)
