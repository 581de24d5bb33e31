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
    """int64: document of each position; None when a sample is one document."""
