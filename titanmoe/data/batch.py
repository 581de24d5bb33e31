"""What a data rank works on at once.

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
    """bool: False for padding, which visits no expert and counts nowhere."""
    document_BS: Tensor | None = None
    """int64: document of each position, one run of positions each; None when a sample is one document."""
    position_BS: Tensor | None = None
    """int64: position of each in its document, for RoPE; None when a sample is one document."""
    number_B: Tensor | None = None
    """int64: number of each sample within the step; None: microbatches in turn, in each the data ranks in turn."""
