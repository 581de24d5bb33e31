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
from typing import Any, NamedTuple

from titanmoe.config.blocks import window
from titanmoe.config.component_kinds import Spec
from titanmoe.config.schema import Config, Model

Shape = tuple[int, ...]
Split = tuple[Shape, int | None]
"""Shape of a tensor, and the dim that tp shards; None if it is replicated."""


def elements(tensors: Iterable[Split]) -> int:
    """Return the number of elements of all tensors together."""
    return sum(prod(shape) for shape, _ in tensors)


class MatrixRows(NamedTuple):
    """The division of a weight's rows into matrices, such as the keys and the values of all heads."""

    per_head: tuple[int, ...]
    """Rows of each matrix in every head, in order; empty if all rows are one matrix."""


class ClippedRows(NamedTuple):
    """The rows that QK-Clip scales in a weight or bias of queries or keys."""

    heads: int
    """Heads of the weight."""
    key_heads: int
    """Key heads of the layer. The heads of one key head share a factor."""
    parts: tuple[tuple[int, float], ...]
    """Groups of rows of each head, in order: number of rows, and power of the factor that scales them."""


class Product(NamedTuple):
    """A matrix product of one rank, per position."""

    outputs: float
    inputs: float
    own_tokens: bool = False
    """Whether the product is over the tokens that the rank owns, instead of all positions of its attention slice."""


class MixerWork(NamedTuple):
    """Work of a rank per position of its attention slice, apart from scores and values, for the planner."""

    products: list[Product]
    gathered: float
    """Elements that tp gathers before the products."""
    queries: float = 0.0
    """Elements of the queries, which context parallelism may send."""
    keys: float = 0.0
    """Elements of keys and values, which context parallelism sends."""
    state: float = 0.0
    """Elements that context parallelism sends of a segment of any length, if the mixer works by segments."""
    rotated: float = 0.0
    """Elements that RoPE rotates."""
    normed: float = 0.0
    """Elements that norms of queries and keys read."""
    moved: tuple[float, float] = (0.0, 0.0)
    """Elements that other kernels read and write, in forward and in backward."""


class LocalBatch(NamedTuple):
    """The part of a microbatch that one rank has."""

    tokens: int
    """Tokens that the rank owns."""
    positions: int
    """Positions of its attention slice: tokens times tp."""
    tp: int
    width: int
    """Bytes of an element in the dtype that layers compute in."""
    ring: bool
    """Whether keys and values are passed from rank to rank."""
    segments: int = 0
    """Segments that context parallelism splits the rank's samples into; 0 without it."""


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
        """Return shape and tp's dim of each parameter, by name: its rows of the parallel plan.

        A dim of None replicates the parameter: each rank uses it for tokens, or heads, that no other rank has
        (titanmoe.parallel.parallel_plan).
        """

    def max_tp(self, model: Model) -> dict[str, int]:
        """Return the largest tp that shards a module, for modules that a larger tp replicates.

        Such as the number of key heads: with more ranks each has the full parameters and uses a part of them, and their
        gradients are summed over tp.
        """
        return {}

    def matrices(self, model: Model) -> list[Split]:
        """Return the parameters that multiply each token, which costs two FLOPs per element."""
        return [split for split in self.parameters(model).values() if len(split[0]) == 2]

    def norms(self, model: Model) -> list[Split]:
        """Return the weights of the norms inside the mixer."""
        return [split for name, split in self.parameters(model).items() if name.endswith("norm.weight")]

    def rows(self, model: Model) -> dict[str, MatrixRows]:
        """Return the parameters that optimizers may treat as matrices, and the rows of each matrix, by name.

        Optimizers treat the others as vectors (titanmoe.models.matrices).
        """
        return {}

    def qk_clip_rows(self, model: Model) -> dict[str, ClippedRows]:
        """Return the rows that QK-Clip scales, by parameter; empty if it has no effect, and is refused."""
        return {}

    after_scores: tuple[str, ...] = ()
    """Parameters whose input is the result of the scores, such as the output projection."""

    def pair_flops(self, model: Model) -> int:
        """Return forward FLOPs for a position and one that it sees: score and weighted value."""
        return 0

    def token_flops(self, model: Model) -> int:
        """Return forward FLOPs of a token, apart from products with matrices, that do not depend on what it sees."""
        return 0

    def flops(self, model: Model, layer: int, seq_len: int) -> int:
        """Return forward FLOPs of a token, apart from products with matrices, averaged over a sequence."""
        width = min(window(model, layer) or seq_len, seq_len)
        twice_visible = 2 * width - width * width // seq_len  # average positions: a triangle without a corner
        return self.pair_flops(model) // 2 * twice_visible + self.token_flops(model)

    def work(self, model: Model, tp: int) -> MixerWork:
        """Return the work per position, for the planner: by default the product of each matrix and nothing else."""
        products = []
        for (outputs, inputs), dim in self.matrices(model):
            split_outputs, split_inputs = outputs / tp if dim == 0 else outputs, inputs / tp if dim == 1 else inputs
            products.append(Product(split_outputs, split_inputs, own_tokens=dim is None))
        return MixerWork(products, model.dim)

    @abstractmethod
    def saved_bytes(self, model: Model, batch: LocalBatch, selective: bool) -> int:
        """Return the bytes that the mixer saves for backward of one microbatch, without the block's input.

        For the planner. `selective` is whether activation_checkpoint.mode is "selective".
        """

    def input_positions(self, model: Model, batch: LocalBatch) -> int:
        """Return the number of positions of the block's normed input that its products save for backward.

        By default those of its full attention slice, which tp gathers.
        """
        return batch.positions

    def backward_bytes(self, model: Model, batch: LocalBatch, selective: bool) -> int:
        """Return the most bytes that the mixer holds in backward of one microbatch, without the block's input.

        For the planner. 0 if that is no more than `saved_bytes`. It is more where much is recomputed.
        """
        return 0

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        """Return the numbers that a degree of parallelism must divide, by degree and by name of the number."""
        splits = self.parameters(config.model).values()
        return {"tp": {f"the width of the {self.name}": gcd(*(shape[dim] for shape, dim in splits if dim is not None))}}

    def violations(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        """Yield reasons why the mixer cannot run with these degrees of parallelism."""
        if degrees.get("cp", 1) > 1 and not self.attends and not self.by_segments:
            yield (
                f"parallelism.cp = {degrees['cp']} splits sequences, and the {self.name} of model.family = "
                f'"{config.model.family}" needs full sequences: use cp = 1'
            )

    def build(self, model: Model, layer: int, dtype: Any, kernels: str) -> Any:
        """Build the mixer's module for a layer. `dtype` is a torch.dtype."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)(model, layer, dtype, kernels)
