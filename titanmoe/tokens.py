"""Metadata of a microbatch's tokens on one rank: positions, samples, padding, mask.

The model passes it to every layer. Shapes: B samples of the microbatch, S positions of this rank's slice of the
sequence in attention (the sequence / cp), T tokens that this rank owns (B * sequence / (cp * tp), flattened): the
disjoint set of tokens that the MoE layer gets; N MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from titanmoe.mask import CAUSAL, Mask

NO_EXPERT, NOT_RECORDED = -1, -2
"""Marks in routes (Tokens.given_TNK): the token visits no expert; the router chooses for the token itself."""
IGNORE = -100
"""The label of a position that has no loss."""


class Tokens(NamedTuple):
    """Metadata of the tokens of one microbatch on this rank."""

    position_BS: Tensor
    """Position of each token of the attention slice in its sequence, or in its document there, for RoPE."""
    index_T: Tensor
    """Global index within the optimizer step: sample of the step * seq_len + position in the sequence."""
    sample_T: Tensor
    """Sample within the microbatch, 0 to B - 1."""
    valid_T: Tensor
    """False for padding, which is routed to no expert and not counted."""
    microbatch: Tensor
    """Index of the microbatch within the step, a scalar."""
    mask: Mask = CAUSAL
    """The attention mask of the full sequence, without windows of layers."""
    next_BS: Tensor | None = None
    """Id of the token after each position, for multi-token prediction; None without it."""
    later_BS: Tensor | None = None
    """Label of multi-token prediction at each position: the token after the next; None without it."""
    given_TNK: Tensor | None = None
    """Experts that routers have to choose, int16, or one of the marks in all K places: for each of the model's N MoE
    layers, in order, without multi-token prediction's. None: routers choose."""
    routes_TNK: Tensor | None = None
    """Tensor in which routers write their own choice, like given_TNK but E for padding; None: nowhere."""
    index_BS: Tensor | None = None
    """Global index, like index_T, of each token of the attention slice, for dropout of adapters; None without it."""

    def halves(self) -> tuple[Tokens, Tokens]:
        """Return the metadata of the first and the second half of the samples, with None for next_BS and later_BS.

        Of an odd number the first half has more. sample_T begins at 0 in both; given_TNK and routes_TNK are views.
        """
        B = len(self.position_BS)

        def split(x_T: Tensor) -> Iterator[Tensor]:
            return (half.flatten() for half in x_T.view(B, -1).tensor_split(2))

        owned = split(self.index_T), split(self.sample_T), split(self.valid_T)
        first, second = (
            Tokens(position_BS, index_T, sample_T, valid_T, self.microbatch, mask)
            for position_BS, index_T, sample_T, valid_T, mask in zip(
                self.position_BS.tensor_split(2), *owned, self.mask.halves(), strict=True
            )
        )
        if self.index_BS is not None:
            indices = zip((first, second), self.index_BS.tensor_split(2), strict=True)
            first, second = (half._replace(index_BS=index_BS) for half, index_BS in indices)
        for name in ("given_TNK", "routes_TNK"):
            if (routes := getattr(self, name)) is not None:  # views, in which the routers of both halves write
                border = len(first.index_T)
                first, second = first._replace(**{name: routes[:border]}), second._replace(**{name: routes[border:]})
        return first, second._replace(sample_T=second.sample_T - len(first.position_BS))
