"""Lengths of documents against training.seq_len, as text for the header of a run and for `titanmoe data show`.

Lengths are in positions. A document of n tokens fills n - 1; a preference pair fills those of both completions, each
with the prompt, which counts once with data.share_prefixes.

Shapes: D documents, or pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from titanmoe.data.documents import is_masked

if TYPE_CHECKING:  # titanmoe.data.pack_chats imports this module
    from titanmoe.data.pack import BestFitPacker, StreamPacker

MANY = 0.05
"""Fraction of documents that do not fit, above which a run's header gives the seq_len that would keep most of them."""
MEASURED = 100_000
"""Number of documents or pairs of a source that `titanmoe data show` measures."""
CHUNK = 1 << 22
"""Number of tokens whose label mask is read at a time."""
BAR = 40
"""Characters of the histogram's longest bar."""


def format_seq_lens(length_D: np.ndarray, total: int) -> str:
    """Return the smallest values of seq_len that keep 95, 99 and 100 % of the documents, as text.

    Args:
        length_D: lengths of the documents, at least of the longest 5 % and of one more.
        total: number of all documents.
    """
    ascending_D = np.sort(length_D)
    # The k-th shortest of all documents is k - total from the end.
    keep = [f"{int(ascending_D[-(-total * percent // 100) - 1 - total]):,}" for percent in (95, 99, 100)]
    return f"seq_len = {keep[0]}, {keep[1]} and {keep[2]} would keep 95, 99 and 100 % of all"


def describe_needed(long_D: np.ndarray, total: int) -> str:
    """Return text on the seq_len that documents longer than the recipe's need.

    If more than 5 % of all do not fit, it is that of `format_seq_lens`; else it gives the longest one's.

    Args:
        long_D: lengths of the documents that do not fit.
        total: number of all documents.
    """
    if len(long_D) > MANY * total:
        return format_seq_lens(long_D, total)
    return f"the longest needs seq_len = {int(long_D.max(initial=0)):,}"


def describe_lengths(packer: StreamPacker | BestFitPacker) -> list[str]:
    """Return lines on the first MEASURED documents or pairs of a source: a histogram, how many fit, what is learned.

    If some do not fit, a line says what becomes of them. What is learned is a number and fraction of tokens.
    """
    documents, per_prompt = packer.documents, packer.documents.completions_per_prompt
    total = len(documents) // per_prompt
    count = min(total, MEASURED)
    what = "pairs" if per_prompt > 1 else "chats" if is_masked(documents) else "documents"
    length_D, end = packer.needed_lengths(count), int(documents.starts[count * per_prompt])
    long = int((length_D > packer.seq_len).sum())
    learned = end
    if is_masked(documents):
        masks = (documents.label_mask(start, min(start + CHUNK, end)) for start in range(0, end, CHUNK))
        learned = sum(int(mask.sum()) for mask in masks)
    return [
        f"lengths of {f'the first {count:,} of' if count < total else 'all'} {total:,} {what}, in positions:",
        *_draw_histogram(length_D),
        f"{count - long:,} fit seq_len = {packer.seq_len:,}, and {long:,} ({long / count:.1%}) do not"
        + f": {packer.describe_long(count)}" * (long > 0),
        format_seq_lens(length_D, count),
        f"{learned:,} of {end:,} tokens ({learned / end:.1%}) are learned",
    ]


def _draw_histogram(length_D: np.ndarray) -> list[str]:
    """Return a line for each range 2**(b - 1) + 1 to 2**b: the range, the number of documents in it, and a bar.

    From the range of the shortest document to that of the longest, empty ones between them too; [] without documents.
    """
    bin_D = np.ceil(np.log2(np.maximum(length_D, 1))).astype(np.int64)
    lines = []
    for b, count in enumerate(np.bincount(bin_D).tolist()):
        if b >= bin_D.min():
            bar = "#" * -(-count * BAR // int(np.bincount(bin_D).max()))
            lines.append(f"    {2**b // 2 + 1 if b else 0:>9,} to {2**b:>9,}  {count:>9,}  {bar}".rstrip())
    return lines
