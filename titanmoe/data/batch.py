"""What a data rank works on at one time.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

WEIGHT = "weight"
"""Of each label, in Batch.further: float32; 0 where there is no label."""
REFERENCE = "reference"
"""Its log-probability by the reference; there once it is known."""
ANSWER, PAIRS = "answer", "pairs"
"""Of pairs of answers: the number of each position's answer in its sample, 2 i for the chosen and 2 i + 1 for the
rejected one; and how many pairs a sample has. int64."""

KEPT, KEPT_LOG_P = "kept", "kept_log_p"
"""Of a teacher's distribution, in Batch.further: K ids of each position, int64 (B, S, K), and the log-probabilities of
these and of all others together, float32 at least (B, S, K + 1)."""


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
    until_BS: Tensor | None = None
    """int64, where documents branch (titanmoe.mask): the place after the last position that sees this one. position_BS
    is then its depth."""
    number_B: Tensor | None = None
    """int64: number of each sample within the step; None: microbatch by microbatch, and within each, data rank by data
    rank."""
    further: Mapping[str, Tensor] = MappingProxyType({})
    """What an objective reads besides, by name: a number per position (B, S), such as WEIGHT, K of them (B, S, K), or
    one per sample (B,)."""

    def chunk(self, count: int) -> list[Batch]:
        """Split into as many batches."""

        def parts(x: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * count if x is None else x.chunk(count)

        fields = zip(*map(parts, self[:-1]), strict=True)
        further = {name: parts(x) for name, x in self.further.items()}
        return [Batch(*row, {name: x[m] for name, x in further.items()}) for m, row in enumerate(fields)]
