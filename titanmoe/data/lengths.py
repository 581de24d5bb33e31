"""Lengths of documents against training.seq_len, as text for the header of a run and for `titanmoe data show`.

Lengths are in positions. A document of n tokens fills n - 1; a preference pair fills those of both completions, each
with the prompt, which counts once with data.share_prefixes.

Shapes: D documents, or pairs.
"""

from __future__ import annotations

import numpy as np

MANY = 0.05
"""Fraction of documents that do not fit, above which a run's header gives the seq_len that would keep most of them."""


def format_seq_lens(length_D: np.ndarray, total: int) -> str:
    """Return the smallest seq_len that keep 95, 99 and 100 % of the documents, as text.

    Args:
        length_D: lengths of the longest documents, more than 5 % of all, or of all.
        total: number of all documents.
    """
    ascending_D = np.sort(length_D)
    # The k-th shortest of all documents is k - total from the end.
    keep = [f"{int(ascending_D[-(-total * percent // 100) - 1 - total]):,}" for percent in (95, 99, 100)]
    return f"seq_len = {keep[0]}, {keep[1]} and {keep[2]} would keep 95, 99 and 100 % of all"


def describe_needed(long_D: np.ndarray, total: int) -> str:
    """Return text on the seq_len that documents longer than the recipe's need.

    Args:
        long_D: lengths of the documents that do not fit.
        total: number of all documents.
    """
    if len(long_D) > MANY * total:
        return format_seq_lens(long_D, total)
    return f"the longest needs seq_len = {int(long_D.max(initial=0)):,}"
