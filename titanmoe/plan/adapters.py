"""The adapters of a block, as the planner prices them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Config
from titanmoe.models.families import mixers
from titanmoe.models.tensors import Tuning, block_name, expert_splits, of_block

ADDED, KERNELS = 6, (4, 6)
"""Of an adapted matrix: bytes moved, in 16 bits, per element to which the adapter's share is added (its outputs; in
backward its inputs' gradients), and kernels: two narrow products, a scale and a sum; in backward four products."""


class Adapter(NamedTuple):
    """On a matrix."""

    name: str
    rank: int
    inputs: int
    outputs: int
    inputs_split: bool
    """Whether tp or etp divides the inputs."""
    outputs_split: bool


def adapters_of(config: Config, layer: int, w: int) -> Iterator[Adapter]:
    """Of a block. w: bytes of the compute dtype."""
    if not config.lora.rank:
        return
    model, experts = config.model, has_experts(config.model, layer)
    matrices = of_block(model, mixers(model)[layer], experts) | (expert_splits(model) if experts else {})
    pairs = list(Tuning.of(config).adapters(block_name(model, layer), matrices).items())
    for (name, (a, a_dim)), (_, (b, b_dim)) in zip(pairs[::2], pairs[1::2], strict=True):
        filled = -a[-2] % (16 // w) if ".experts." in name else 0  # titanmoe.moe.experts
        yield Adapter(name, a[-2] + filled, a[-1], b[-2], a_dim is not None, b_dim is not None)
