"""What is known of a mixer without torch: its parameters, its work, the memory that it keeps, and what it refuses.

A mixer is the layer of a block in which tokens see each other. Its module is made with (model, layer, dtype, kernels),
and called with the tokens that a rank owns, cos and sin of RoPE, and the mask (titanmoe.mask); it returns what is
added to the residual stream. Its `tp` is the group of tensor parallel ranks. `initial`, if it has one, says how those
parameters begin that are neither normal nor norms nor biases.
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
"""A tensor's shape, and the dim that tp divides, if any."""


def elements(tensors: Iterable[Split]) -> int:
    return sum(prod(shape) for shape, _ in tensors)


class MatrixRows(NamedTuple):
    """How the rows of a weight are divided into matrices: each head has `parts`, one below the other, and the same part
    of all heads is one matrix. Without parts all rows are one."""

    parts: tuple[int, ...]


class ClippedRows(NamedTuple):
    """The rows of a weight or bias that makes queries or keys, for QK-Clip."""

    heads: int
    key_heads: int
    """Heads of the layer that share a factor are those of one key head."""
    parts: tuple[tuple[int, float], ...]
    """Of each head: how many rows, and the power of the factor that scales them."""


class Product(NamedTuple):
    """A matrix product of one rank, for each position."""

    outputs: float
    inputs: float
    own_tokens: bool = False
    """Over the tokens that the rank owns, instead of all positions of its slice."""


class MixerWork(NamedTuple):
    """What a rank does for a position of its slice apart from scores and values, for the planner, in elements."""

    products: list[Product]
    gathered: float
    """What tp gathers of a position before the products."""
    queries: float = 0.0
    keys: float = 0.0
    """Keys and values. Context parallelism sends these two."""
    state: float = 0.0
    """In their place, if it goes by runs: what context parallelism sends of a run, whatever its length."""
    rotated: float = 0.0
    """Turned by RoPE."""
    normed: float = 0.0
    """What norms of queries and keys read."""
    moved: tuple[float, float] = (0.0, 0.0)
    """What other kernels read and write, in forward and in backward."""


class BatchShare(NamedTuple):
    """A microbatch as one rank has it."""

    tokens: int
    """How many tokens the rank owns."""
    positions: int
    """How many positions its attention slice has: tokens times tp."""
    tp: int
    width: int
    """Bytes of a number in the dtype that layers compute in."""
    ring: bool
    """Whether keys and values are passed from rank to rank."""
    runs: int = 0
    """How many runs context parallelism cuts its samples into; 0 without it."""


class MixerSpec(Spec, ABC):
    name = ""
    """Its name in messages, such as "latent attention"."""
    attends = False
    """Whether its module calls its `attend` with queries, keys and values. Context parallelism replaces that."""
    by_runs = False
    """Whether its module goes by its `runs` (titanmoe.models.runs), which context parallelism sets; it refuses a mixer
    that neither does nor attends."""
    cache = ""
    """What keeps its earlier tokens where text is generated, as "module:NAME", if its module is not one that whoever
    generates knows. Without one it cannot generate."""

    @abstractmethod
    def parameters(self, model: Model) -> dict[str, Split]:
        """Return the shape of each of its parameters by name, and the dim along which tp shards it: its rows of the
        parallel plan (titanmoe.parallel.tensor). None: each rank has all of it and uses it for tokens, or heads, that
        no other rank has."""

    def up_to(self, model: Model) -> dict[str, int]:
        """Return, for its modules whose parameters tp shards only up to some number of ranks, that number. With more,
        each rank has all of them and uses a part, and their gradients are summed over tp."""
        return {}

    def matrices(self, model: Model) -> list[Split]:
        """Return the parameters that its tokens are multiplied by, which costs two FLOPs per element."""
        return [split for split in self.parameters(model).values() if len(split[0]) == 2]

    def norms(self, model: Model) -> list[Split]:
        """Return the weights of norms inside it."""
        return [split for name, split in self.parameters(model).items() if name.endswith("norm.weight")]

    def rows(self, model: Model) -> dict[str, MatrixRows]:
        """Of those parameters, by name, that an optimizer may take for matrices (titanmoe.models.matrices). The others
        it takes for vectors."""
        return {}

    def clipped(self, model: Model) -> dict[str, ClippedRows]:
        """Of those parameters, by name, that QK-Clip scales. None: it has no effect, and is refused."""
        return {}

    after_scores: tuple[str, ...] = ()
    """Of these, those whose input is what its tokens have seen of each other."""

    def pair_flops(self, model: Model) -> int:
        """Forward FLOPs for a position and one that it sees: score and weighted value."""
        return 0

    def token_flops(self, model: Model) -> int:
        """Forward FLOPs of a token apart from its products with matrices, however many it sees."""
        return 0

    def flops(self, model: Model, layer: int, seq_len: int) -> int:
        """Forward FLOPs of a token apart from its products with matrices, averaged over a sequence."""
        width = min(window(model, layer) or seq_len, seq_len)
        twice_visible = 2 * width - width * width // seq_len  # average positions: a triangle without a corner
        return self.pair_flops(model) // 2 * twice_visible + self.token_flops(model)

    def work(self, model: Model, tp: int) -> MixerWork:
        """For the planner: by default the product of each matrix, and nothing else that takes time."""
        products = []
        for (outputs, inputs), dim in self.matrices(model):
            split_outputs, split_inputs = outputs / tp if dim == 0 else outputs, inputs / tp if dim == 1 else inputs
            products.append(Product(split_outputs, split_inputs, own_tokens=dim is None))
        return MixerWork(products, model.dim)

    @abstractmethod
    def kept_bytes(self, model: Model, share: BatchShare, selective: bool) -> int:
        """For the planner: what a block keeps for backward of one microbatch, without its input. selective: with
        activation_checkpoint.mode = "selective"."""

    def input_positions(self, model: Model, share: BatchShare) -> int:
        """Return of how many positions its products save the block's normed input for backward: by default of its
        whole slice, which tp gathers."""
        return share.positions

    def backward_bytes(self, model: Model, share: BatchShare, selective: bool) -> int:
        """For the planner: what it holds at most in backward of one microbatch, without its input, if that may exceed
        what it keeps for it, as where much is computed again."""
        return 0

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        splits = self.parameters(config.model).values()
        return {"tp": {f"the width of the {self.name}": gcd(*(shape[dim] for shape, dim in splits if dim is not None))}}

    def violations(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        if degrees.get("cp", 1) > 1 and not self.attends and not self.by_runs:
            yield (
                f"parallelism.cp = {degrees['cp']} splits sequences, and the {self.name} of model.family = "
                f'"{config.model.family}" needs whole ones: use cp = 1'
            )

    def build(self, model: Model, layer: int, dtype: Any, kernels: str) -> Any:
        """Its module. dtype: a torch.dtype."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)(model, layer, dtype, kernels)
