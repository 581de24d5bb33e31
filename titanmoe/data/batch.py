"""The tensors that one data rank trains on at a time, and the names of the extra fields that objectives read.

The loader yields a `Batch` per microbatch; titanmoe.parallel.batch_slice takes each rank's slice of it.

Shapes: B samples, S positions, K ids that a teacher's distribution is stored for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

WEIGHT = "weight"
"""Extra field: weight of each label in the loss, float32 (B, S); 0 where there is no label."""
REFERENCE = "reference"
"""Extra field: log-probability of each label under the reference model (B, S)."""
COMPLETION, PAIRS = "completion", "pairs"
"""Extra fields of preference data, int64. COMPLETION (B, S): number of the completion that a position belongs to, 2 i
for the chosen and 2 i + 1 for the rejected one of pair i of the sample. PAIRS (B,): pairs in the sample."""

ROUTES = "routes"
"""Extra field: experts that routers have to choose (B, S, N, K), int16: titanmoe.tokens.Tokens.given_TNK."""
TEACHER_IDS, TEACHER_LOG_P = "teacher_ids", "teacher_log_p"
"""Extra fields of a teacher's distribution. TEACHER_IDS (B, S, K): the K ids of each position, int64. TEACHER_LOG_P
(B, S, K + 1): the log-probabilities of these ids and of all others together, float32 or wider."""


class Batch(NamedTuple):
    """Samples of one data rank: a microbatch, or all microbatches of a step concatenated."""

    tokens_BS: Tensor
    """Input token ids, int64."""
    labels_BS: Tensor
    """Next token of each position, int64; titanmoe.tokens.IGNORE where there is no label."""
    valid_BS: Tensor
    """False for padding, which is routed to no expert and counted nowhere; bool."""
    document_BS: Tensor | None = None
    """Document id of each position, int64; a document is one contiguous segment. None if each sample is one
    document."""
    position_BS: Tensor | None = None
    """Position of each token in its document, for RoPE, int64. None if each sample is one document."""
    until_BS: Tensor | None = None
    """One past the last position that attends to this one, int64, where documents branch (titanmoe.mask). position_BS
    is then the depth in the tree. None if documents do not branch."""
    number_B: Tensor | None = None
    """Number of each sample within the step, int64. None: numbered by microbatch, then by data rank."""
    extra_fields: Mapping[str, Tensor] = MappingProxyType({})
    """Fields that only some objectives read, by name: per position (B, S) or (B, S, K), or per sample (B,)."""

    def chunk(self, count: int) -> list[Batch]:
        """Split the batch along the samples into `count` batches of equal size, such as a step into microbatches.

        They are views in the order of the samples, whose number is a multiple of `count`.
        """

        def split(x: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * count if x is None else x.chunk(count)

        fields = zip(*map(split, self[:-1]), strict=True)
        extra_fields = {name: split(x) for name, x in self.extra_fields.items()}
        return [Batch(*values, {name: x[m] for name, x in extra_fields.items()}) for m, values in enumerate(fields)]
