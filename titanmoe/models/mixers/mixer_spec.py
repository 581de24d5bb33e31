"""The interface of a mixer's spec: its parameters, work and activation memory, and what it refuses. No torch here.

A mixer is the layer of a block in which tokens see each other. Its module is made with (model, layer, dtype, kernels),
and called with the tokens that a rank owns, cos and sin of RoPE, and the mask (titanmoe.mask); it returns what is
added to the residual stream. Its `tp` is the group of tensor parallel ranks. `initial`, if it has one, gives the
initial values of parameters that are neither normal nor norms nor biases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

from titanmoe.config.blocks import window
from titanmoe.config.component_kinds import Spec
from titanmoe.config.schema import Config, Model

if TYPE_CHECKING:
    import torch
    from torch import nn

Shape = tuple[int, ...]
Split = tuple[Shape, int | None]
"""Full shape of a tensor, and the dim that tp shards; None if it is replicated."""


def elements(tensors: Iterable[Split]) -> int:
    """Return the number of elements of all full tensors together."""
    return sum(prod(shape) for shape, _ in tensors)


class MatrixRows(NamedTuple):
    """The division of a weight's rows into the matrices that Muon orthogonalizes, such as keys and values."""

    per_head: tuple[int, ...]
    """Number of consecutive rows in each head that belong to the first matrix, the second, and so on.

    A matrix consists of the rows of all heads. Empty if all rows of the weight are one matrix.
    """


class ClippedRows(NamedTuple):
    """The rows that QK-Clip scales in a weight or bias of queries or keys."""

    heads: int
    """Heads of the weight."""
    key_heads: int
    """Key heads of the layer. The heads of one key head share a factor."""
    parts: tuple[tuple[int, float], ...]
    """Consecutive groups of rows in each head: (number of rows, power of QK-Clip's factor that scales them)."""


class Product(NamedTuple):
    """The size of a matrix product that one rank computes for each position: inputs x outputs multiplications."""

    outputs: float
    inputs: float
    own_tokens: bool = False
    """Whether the product is over the tokens that the rank owns, instead of all positions of its attention slice."""


class MixerWork(NamedTuple):
    """Work of a rank per position of its attention slice, without scores and weighted values, for the planner."""

    products: list[Product]
    gathered: float
    """Elements per position that tp gathers before the products."""
    queries: float = 0.0
    """Elements of the queries, which context parallelism may send."""
    keys: float = 0.0
    """Elements of keys and values, which context parallelism sends."""
    state: float = 0.0
    """Elements of the state that context parallelism sends once per segment, if the mixer works by segments."""
    rotated: float = 0.0
    """Elements that RoPE rotates."""
    normed: float = 0.0
    """Elements that norms of queries and keys read."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Elements that all other kernels read and write per position: in forward, in backward."""


class LocalBatch(NamedTuple):
    """The sizes of one rank's slice of a microbatch."""

    tokens: int
    """Tokens that the rank owns."""
    positions: int
    """Positions of the rank's attention slice: tokens times tp."""
    tp: int
    """Number of ranks of tensor parallel."""
    width: int
    """Bytes of an element in the dtype that layers compute in."""
    ring: bool
    """Whether context parallelism passes keys and values from rank to rank (parallelism.cp_kind = "ring")."""
    segments: int = 0
    """Segments that context parallelism splits the microbatch's samples into, over all ranks of cp; 0 without cp."""
    gathered: int = 1
    """Number of ranks whose keys and values attention saves: those of cp if it gathers them."""
    mask: int = 0
    """Bytes of the mask of full sequences that attention saves, where documents are apart and no kernel skips them."""


class MixerSpec(Spec, ABC):
    """The spec of one kind of mixer, which families choose for their blocks."""

    name = ""
    """Name of the mixer in messages, such as "latent attention"."""
    attends = False
    """Whether its module calls its `attend` with queries, keys and values, which context parallelism replaces."""
    by_segments = False
    """Whether its module works by its `segments` (titanmoe.models.sequence_segments), which context parallelism sets.

    Context parallelism refuses a mixer that neither does nor attends.
    """
    cache = ""
    """Class that caches its earlier tokens in generation, as "module:NAME".

    Empty for modules that titanmoe.generate knows; a mixer that is neither cannot generate.
    """

    @abstractmethod
    def parameters(self, model: Model) -> dict[str, Split]:
        """Return the full shape, and the dim that tp shards, of each parameter, by name within the mixer ("wq.weight").

        A dim of None replicates the parameter: each rank uses it for tokens, or heads, that no other rank has
        (titanmoe.parallel.parallel_plan).
        """

    def max_tp(self, model: Model) -> dict[str, int]:
        """Return the largest tp that shards a module of the mixer, such as {"wk": 8}; {} if no module has a limit.

        For the projections of keys and values it is the number of key heads. A larger tp replicates the module: each
        rank has the full parameters and uses a part of them, and their gradients are summed over tp.
        """
        return {}

    def matrices(self, model: Model) -> list[Split]:
        """Select the `parameters` with two dims, as (shape, sharded dim): each element costs two FLOPs per token."""
        return [split for split in self.parameters(model).values() if len(split[0]) == 2]

    def norms(self, model: Model) -> list[Split]:
        """Select the `parameters` that are norms inside the mixer, as (shape, sharded dim)."""
        return [split for name, split in self.parameters(model).items() if name.endswith("norm.weight")]

    def matrix_rows(self, model: Model) -> dict[str, MatrixRows]:
        """Return how the rows of each weight divide into matrices for Muon, by parameter name.

        Parameters without an entry, by default all, are trained by AdamW (titanmoe.models.matrices).
        """
        return {}

    def qk_clip_rows(self, model: Model) -> dict[str, ClippedRows]:
        """Return which rows of which parameters QK-Clip scales, by name within the mixer.

        Empty for a mixer on which QK-Clip has no effect: a recipe that asks for it is refused.
        """
        return {}

    after_scores: tuple[str, ...] = ()
    """Names of the parameters that multiply attention's result (the weighted values), such as the output projection."""

    def pair_flops(self, model: Model) -> int:
        """Return the forward FLOPs of one (query, key) pair of positions in all heads: score and weighted value."""
        return 0

    def token_flops(self, model: Model) -> int:
        """Return the forward FLOPs of a token that are no products with weights and depend on no other position."""
        return 0

    def flops(self, model: Model, layer: int, seq_len: int) -> int:
        """Return the forward FLOPs of a token without products with weights, averaged over a causal sequence.

        `layer` is the number of the block, which may have a sliding window; the sequence has `seq_len` tokens.
        """
        width = min(window(model, layer) or seq_len, seq_len)
        twice_visible = 2 * width - width * width // seq_len  # average positions: a triangle without a corner
        return self.pair_flops(model) // 2 * twice_visible + self.token_flops(model)

    def work(self, model: Model, tp: int) -> MixerWork:
        """Return the work per position of one of `tp` ranks, for the planner.

        By default that of products with `matrices`, replicated ones over owned tokens, and of gathering their input.
        """
        products = []
        for (outputs, inputs), dim in self.matrices(model):
            split_outputs, split_inputs = outputs / tp if dim == 0 else outputs, inputs / tp if dim == 1 else inputs
            products.append(Product(split_outputs, split_inputs, own_tokens=dim is None))
        return MixerWork(products, model.dim)

    @abstractmethod
    def saved_bytes(self, model: Model, batch: LocalBatch, selective: bool) -> int:
        """Return the bytes that one rank's mixer saves for backward of one microbatch, without the block's input.

        For the planner, which adds the normed input itself (`input_positions`). `selective` is whether
        activation_checkpoint.mode is "selective".
        """

    def input_positions(self, model: Model, batch: LocalBatch) -> int:
        """Return for how many positions the mixer's products save the block's normed input for backward.

        For the planner. By default all positions of the rank's attention slice, which tp gathers.
        """
        return batch.positions

    def backward_bytes(self, model: Model, batch: LocalBatch, selective: bool) -> int:
        """Return the most bytes that one rank's mixer holds in backward of a microbatch, without the block's input.

        For the planner. 0 if that is no more than `saved_bytes`. It is more where much is recomputed. `selective` is
        whether activation_checkpoint.mode is "selective".
        """
        return 0

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        """Return the numbers that a degree of parallelism must divide, as {"tp": {"model.num_heads": 16}}.

        By default one for tp: the greatest common divisor of all dims that tp shards.
        """
        splits = self.parameters(config.model).values()
        return {"tp": {f"the width of the {self.name}": gcd(*(shape[dim] for shape, dim in splits if dim is not None))}}

    def violations(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        """Yield a message for each reason, besides those of `divided`, why the mixer cannot run with these degrees.

        By default one: cp for a mixer that neither attends nor works by segments. `degrees` has numbers of ranks by
        axis, such as {"cp": 2}; an axis may be missing.
        """
        if degrees.get("cp", 1) > 1 and not self.attends and not self.by_segments:
            yield (
                f"parallelism.cp = {degrees['cp']} splits sequences, and the {self.name} of model.family = "
                f'"{config.model.family}" needs full sequences: use cp = 1'
            )

    def build(self, model: Model, layer: int, dtype: torch.dtype, kernels: str) -> nn.Module:
        """Build the mixer's torch module, of the class that `implementation` names. Its parameters have no values yet.

        Args:
            layer: number of the block.
            dtype: of the parameters.
            kernels: moe.kernels: "auto" for Triton kernels on GPUs, "triton" or "torch" for one everywhere.
        """
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)(model, layer, dtype, kernels)
