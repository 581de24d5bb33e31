"""The matrices that parameters are made of, for optimizers that work on whole ones. No torch here.

Most weights are one matrix. A stack of experts is one for each of them; the rows of some weights are several side by
side, such as the latents and the turned keys of latent attention. Queries, keys and values, and gate and up, are
parameters of their own.
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
"""Numbers of a rank's pieces that travel at once, unless a single weight has more."""
Span = tuple[int, int]
"""First row, and the one after the last."""


class Matrix(NamedTuple):
    """One of a parameter's."""

    shape: tuple[int, int]
    spans: tuple[Span, ...]
    """Of the parameter's rows, in the order in which the matrix has them."""
    expert: int = -1
    """Its place in a stack."""

    @property
    def flops_per_step(self) -> int:
        """Of one Newton-Schulz step: two products of small x large by large x small, one of the small square."""
        small, large = sorted(self.shape)
        return 4 * small * small * large + 2 * small**3


def matrices_of(shape: Shape, rows: MatrixRows, by_head: bool) -> list[Matrix]:
    """Of a parameter of that shape, whose rows are divided so."""
    if len(shape) == 3:
        return [Matrix(shape[1:], ((0, shape[1]),), expert) for expert in range(shape[0])]
    height, begin, out = sum(rows.parts), 0, []
    heads = shape[0] // height if height else 0
    if not height or (len(rows.parts) == 1 and not by_head):
        return [Matrix(shape, ((0, shape[0]),))]
    for part in rows.parts:
        spans = [(head * height + begin, head * height + begin + part) for head in range(heads)]
        for own in [[span] for span in spans] if by_head else [spans]:
            out.append(Matrix((part * len(own), shape[1]), tuple(own)))
        begin += part
    return out


def declared(model: Model, router: bool) -> dict[str, tuple[Shape, MatrixRows]]:
    """The parameters that declare what matrices they are made of, by their names in checkpoints: projections of
    attention, of dense networks and of experts. Embeddings, the head, norms, biases and gates do not; routers do if
    asked for."""
    whole, out = MatrixRows(()), {}
    for layer, mixer in enumerate(mixers(model)):
        block, experts = tensors.block_name(model, layer), has_experts(model, layer)
        parts = tensors.of_block(model, mixer, experts)
        rows = {f"attention.{name}": value for name, value in mixer.rows(model).items()}
        rows |= {name: whole for name in parts if name.startswith(("ffn.w", "moe.shared.w"))}
        shapes = {name: shape for name, (shape, _) in parts.items()}
        if experts:
            stacks = {name: shape for name, (shape, _) in tensors.of_experts(model).items() if len(shape) == 3}
            shapes |= stacks | {name: shape for name, (shape, _) in tensors.of_router(model).items()}
            rows |= dict.fromkeys(stacks, whole) | ({"moe.router.weight": whole} if router else {})
        out |= {f"{block}.{name}": (shapes[name], value) for name, value in rows.items()}
    if model.mtp_depth:
        out["mtp.0.project.weight"] = (model.dim, 2 * model.dim), whole
    return out


def flops(model: Model, by_head: bool, router: bool, steps: int) -> int:
    """Of orthogonalising every matrix once."""
    total = 0
    for shape, rows in declared(model, router).values():
        stack = prod(shape[:-2])
        total += stack * sum(matrix.flops_per_step for matrix in matrices_of(shape[-2:], rows, by_head))
    return steps * total
