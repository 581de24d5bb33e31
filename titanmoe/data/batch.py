"""What a data rank works on at one time.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    tokens_BS: Tensor
    """int64."""
    labels_BS: Tensor
    """int64: the next token, or titanmoe.tokens.IGNORE."""
    valid_BS: Tensor
    """bool: False for padding, which visits no expert and is not counted anywhere."""
    document_BS: Tensor | None = None
    """int64: document of each position, one run of positions each; None when a sample is one document."""
    position_BS: Tensor | None = None
    """int64: each position's place in its document, for RoPE; None when a sample is one document."""
    number_B: Tensor | None = None
    """int64: number of each sample within the step; None: microbatch by microbatch, and within each, data rank by data
    rank."""
