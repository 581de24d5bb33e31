"""List the matrices that parameters consist of, for optimizers that work on full matrices (Muon). No torch here.

Most weights are one matrix. A stack of experts is one matrix per expert; the rows of some weights are several matrices,
such as the latents and the rotated keys of latent attention. Queries, keys and values, and gate and up, are separate
parameters.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Model
from titanmoe.models import tensors
from titanmoe.models.families import mixers
from titanmoe.models.mixers.mixer_spec import MatrixRows, Shape

ROUND = 1 << 26
"""Largest number of elements of a rank's shards that are exchanged at once, unless a single weight has more."""
Span = tuple[int, int]
"""A range of rows of a parameter: its first row, and the row after its last."""


class Matrix(NamedTuple):
    """One of the matrices that a parameter consists of."""

    shape: tuple[int, int]
    spans: tuple[Span, ...]
    """Ranges of the parameter's rows, in the order in which the matrix has them."""
    expert: int = -1
    """Index of the expert in a stack; -1 if the parameter is no stack."""

    @property
    def flops_per_step(self) -> int:
        """FLOPs of one Newton-Schulz step: two products of small * small * large multiplications, one of small^3."""
        small, large = sorted(self.shape)
        return 4 * small * small * large + 2 * small**3


def matrices_of(shape: Shape, rows: MatrixRows, by_head: bool) -> list[Matrix]:
    """Return the matrices that a parameter consists of: in order of experts, or of `rows.per_head` and then heads.

    A stack of experts has one per expert, and `rows` is not read. Without `by_head` the rows that all heads have for
    one entry of `rows.per_head` are one matrix, of a span of rows per head.

    Args:
        shape: full shape of the parameter: (rows, columns), or (experts, rows, columns).
        rows: how the parameter's rows are divided into matrices.
        by_head: whether each head is a matrix of its own.
    """
    if len(shape) == 3:
        return [Matrix(shape[1:], ((0, shape[1]),), expert) for expert in range(shape[0])]
    height, begin, out = sum(rows.per_head), 0, []
    heads = shape[0] // height if height else 0
    if not height or (len(rows.per_head) == 1 and not by_head):
        return [Matrix(shape, ((0, shape[0]),))]
    for count in rows.per_head:
        spans = [(head * height + begin, head * height + begin + count) for head in range(heads)]
        for of_matrix in [[span] for span in spans] if by_head else [spans]:
            out.append(Matrix((count * len(of_matrix), shape[1]), tuple(of_matrix)))
        begin += count
    return out


def matrix_parameters(model: Model, router: bool) -> dict[str, tuple[Shape, MatrixRows]]:
    """Return full shape and division of the rows of each parameter that an optimizer such as Muon takes as matrices.

    Keys are the names of parameters in checkpoints. The parameters are the projections of mixers (`matrix_rows`), of
    dense networks, of experts and of multi-token prediction, and with `router` those of routers. Embeddings, the head,
    norms, biases, adapters and gates of shared experts are not among them.
    """
    full, out = MatrixRows(()), {}
    for layer, mixer in enumerate(mixers(model)):
        block, experts = tensors.block_name(model, layer), has_experts(model, layer)
        splits = tensors.block_splits(model, mixer, experts)
        rows = {f"attention.{name}": value for name, value in mixer.matrix_rows(model).items()}
        rows |= {name: full for name in splits if name.startswith(("ffn.w", "moe.shared.w"))}
        shapes = {name: shape for name, (shape, _) in splits.items()}
        if experts:
            stacks = {name: shape for name, (shape, _) in tensors.expert_splits(model).items() if len(shape) == 3}
            shapes |= stacks | {name: shape for name, (shape, _) in tensors.router_splits(model).items()}
            rows |= dict.fromkeys(stacks, full) | ({"moe.router.weight": full} if router else {})
        out |= {f"{block}.{name}": (shapes[name], value) for name, value in rows.items()}
    if model.mtp_depth:
        out["mtp.0.project.weight"] = (model.dim, 2 * model.dim), full
    return out


def flops(model: Model, by_head: bool, router: bool, steps: int) -> int:
    """Return the FLOPs of orthogonalizing every matrix of a model once.

    Args:
        by_head: whether each head is a matrix of its own.
        router: whether routers are matrices too.
        steps: number of Newton-Schulz steps for each matrix.
    """
    return steps * sum(
        prod(shape[:-2]) * sum(matrix.flops_per_step for matrix in matrices_of(shape[-2:], rows, by_head))
        for shape, rows in matrix_parameters(model, router).values()
    )
