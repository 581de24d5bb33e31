"""Upcycle a dense model: give it experts so that it computes the same (`titanmoe convert --upcycle`).

Each block's feed-forward network becomes E experts: E / G copies of the G slices (granularity) of its hidden width,
whose outputs y_g add up to y (arXiv 2410.07524; G8T8 of arXiv 2504.14960 is G = 8, top 8 of 64). Router rows are random
for each copy and equal for its slices, so T chosen experts are T / G full copies: ties of two copies do not mix them,
because lower expert numbers win. With W2 of each slice multiplied by G, exact for a power of two, and weights w_c that
sum to one over the copies, whatever the router says,

    sum over copies c, slices g of  w_c / G * (G * y_g)  =  sum over c of w_c * y  =  y.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from titanmoe.checkpoint.hf import config_json as configs
from titanmoe.checkpoint.hf.huggingface_source import HuggingFaceSource
from titanmoe.checkpoint.hf.tensor_map import EXPERT_BIAS, Shape, our_shapes
from titanmoe.checkpoint.move_in_blocks import empty, fill_in_blocks
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Model
from titanmoe.ops import counter_rng
from titanmoe.parallel.materialize import fill_normal


class UpcycledWeights:
    """The weights of a model with experts, made block by block from a dense Hugging Face model."""

    def __init__(self, folder: Path, experts: int, top_k: int, granularity: int, seed: int):
        """Open and check the dense model in a folder; ConfigError if it, or the numbers of experts, cannot be used."""
        parsed = configs.describe_folder(folder, dense=True)
        self.dense = HuggingFaceSource(folder, parsed, parsed.model)
        self.dense.check()
        self.granularity, self.seed = granularity, seed
        self.model = upcycled_model(parsed.model, experts, top_k, granularity)
        self.shapes = our_shapes(self.model)

    @property
    def notes(self) -> list[str]:
        """Lines for the log on what the user should know about the dense model's files."""
        return self.dense.notes

    @cached_property
    def tensors(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of each tensor of the model with experts, by our names."""
        dense = self.dense.tensors
        return {
            name: (shape, torch.float32 if name.endswith(EXPERT_BIAS) else dense[self._dense_name(name)][1])
            for name, shape in self.shapes.items()
        }

    def _dense_name(self, name: str) -> str:
        """Return the dense model's tensor that a tensor gets its values from; a router gets only its dtype."""
        block, moe, rest = name.partition(".moe.")
        if not moe:
            return name
        return f"{block}.ffn.{rest.removeprefix('experts.') if rest.startswith('experts.') else 'w1'}.weight"

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of a tensor of the model with experts, made from the dense model's tensors.

        Args:
            name: our name of the tensor.
            offset: where the block begins in the tensor.
            shape: the block's shape.
        """
        dtype = self.tensors[name][1]
        if name.endswith(EXPERT_BIAS):
            return torch.zeros(shape)
        if name.endswith(".router.weight"):
            return self._router(name, offset, shape).to(dtype)
        origin = self._dense_name(name)
        if origin == name:
            return self.dense.read(name, offset, shape)
        out = empty(shape, dtype)
        hidden, down = self.model.expert_hidden, name.endswith(".w2")
        for row in range(shape[0]):
            start = (offset[0] + row) % self.granularity * hidden
            at = (offset[1], offset[2] + start) if down else (offset[1] + start, offset[2])
            fill_in_blocks(out[row], at, partial(self.dense.read, origin))
            if down:
                out[row] *= self.granularity
        return out

    def _router(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of a router's weight: random rows (init_std, seed), equal for the slices of a copy."""
        copy = torch.arange(offset[0], offset[0] + shape[0]) // self.granularity
        first, last = int(copy[0]), int(copy[-1])
        rows = torch.empty(last - first + 1, shape[1])
        full_shape = torch.Size((self.model.num_experts // self.granularity, self.model.dim))
        fill_normal(
            rows, (first, offset[1]), full_shape, counter_rng.key("weight", self.seed, name), self.model.init_std
        )
        return rows[copy - first]


def upcycled_model(dense: Model, experts: int, top_k: int, granularity: int) -> Model:
    """Return the [model] with experts that computes what a dense one does; ConfigError with all reasons if none can.

    Args:
        dense: the dense [model].
        experts: experts in each block, E.
        top_k: experts that a token is routed to, T.
        granularity: slices that each copy of the feed-forward network is split into, G.
    """
    hidden = dense.dense_hidden
    problems = [
        f"--{name} = {value} is not a number of at least 1"
        for name, value in (("experts", experts), ("top-k", top_k), ("granularity", granularity))
        if value < 1
    ]
    if problems:
        raise ConfigError(problems)
    if granularity & (granularity - 1):
        problems.append(
            f"--granularity = {granularity} is not a power of two: the down projections are multiplied by it, which "
            "would round them; use 1, 2, 4, 8, ..."
        )
    if hidden % granularity:
        problems.append(
            f"--granularity = {granularity} does not split the hidden width {hidden} into equal slices "
            f"({hidden} % {granularity} = {hidden % granularity}): use a divisor of it"
        )
    if experts % granularity:
        problems.append(
            f"--experts = {experts} is not a multiple of --granularity = {granularity}, the slices of each copy: "
            f"use {-(-experts // granularity) * granularity}"
        )
    if top_k % granularity:
        problems.append(
            f"--top-k = {top_k} is not a multiple of --granularity = {granularity}, so a token would visit some slices "
            f"of a copy and not the others, and the output would not be the dense model's: use "
            f"{-(-top_k // granularity) * granularity}"
        )
    if problems:
        raise ConfigError(problems)
    shape = dict(num_dense_layers=0, dense_hidden=0, moe_every=1)
    model = replace(dense, num_experts=experts, top_k=top_k, expert_hidden=hidden // granularity, **shape)
    if broken := configs.violations_of(model):
        raise ConfigError([violation.text for violation in broken])
    return replace(model, size=configs.nearest_size(model))
