"""What a rank needs to know about its tokens besides their ids.

B samples of the microbatch, S positions of the attention slice (the sequence over cp), L the whole sequence, T tokens
this rank owns (B times the sequence over cp and tp, flattened): the disjoint set that the MoE layer sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from titanmoe.mask import CAUSAL, Mask

IGNORE = -100
"""The label of a position that has no loss."""


class Tokens(NamedTuple):
    position_BS: Tensor
    """Position of each token of the attention slice in its sequence, or in its document there, for RoPE."""
    index_T: Tensor
    """Global index within the optimizer step: sample of the step * seq_len + position in the sequence."""
    sample_T: Tensor
    """Sample within the microbatch, 0 to B - 1."""
    valid_T: Tensor
    """False for padding, which visits no expert and is not counted anywhere."""
    microbatch: Tensor
    """Index of the microbatch within the step, a scalar."""
    mask: Mask = CAUSAL
    """Which positions of the whole sequence see which, apart from a layer's window."""
    next_BS: Tensor | None = None
    """Id of the token after each one of the attention slice; None unless the model also predicts the one after that."""
    later_BS: Tensor | None = None
    """The label for that prediction."""

    def halves(self) -> tuple[Tokens, Tokens]:
        """What a block needs to know of the first half of the samples, and of the other."""
        B = len(self.position_BS)

        def own(x_T: Tensor) -> Iterator[Tensor]:
            return (half.flatten() for half in x_T.view(B, -1).tensor_split(2))

        own_parts = own(self.index_T), own(self.sample_T), own(self.valid_T)
        first, second = (
            Tokens(position_BS, index_T, sample_T, valid_T, self.microbatch, mask)
            for position_BS, index_T, sample_T, valid_T, mask in zip(
                self.position_BS.tensor_split(2), *own_parts, self.mask.halves(), strict=True
            )
        )
        return first, second._replace(sample_T=second.sample_T - len(first.position_BS))
