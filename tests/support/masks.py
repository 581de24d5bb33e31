"""Attention masks built by hand, and their dense form by definition. B samples, L positions."""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe.mask import Mask, ends, spans


def mask_of(document_BL: Tensor | None, window: int = 0) -> Mask:
    """Return the mask of documents on their device, with a sliding window.

    Args:
        document_BL: document of each position; None if each sample is one.
        window: positions that a query sees; 0 for all.
    """
    if document_BL is None:
        return Mask(window=window)
    return spans(ends(document_BL.cpu())).to(lambda x: x.to(document_BL.device))._replace(window=window)


def tree_mask(window: int = 0) -> Mask:
    """Return the mask of a tree of 24 positions and a document of 2.

    A prompt of 6 positions has two completions of 5 and 7; the second has two continuations of 3.
    """
    prompt, completion = list(range(6)), list(range(6, 11))
    second, end = list(range(6, 13)), list(range(13, 16))
    until = [24] * 6 + [11] * 5 + [24] * 7 + [21] * 3 + [24] * 3 + [26] * 2
    depth = prompt + completion + second + end * 2 + [0, 1]
    return spans(*(torch.tensor([x]) for x in (until, depth)))._replace(window=window)


def dense_mask(mask: Mask, length: int) -> Tensor:
    """Return by definition whether each query sees each key, as booleans (B, L, L): batch, query, key.

    B is 1 if the mask has no tensors; L is `length`.
    """
    until = torch.full((1, length), length) if mask.until_BL is None else mask.until_BL
    depth = torch.arange(length).expand_as(until) if mask.depth_BL is None else mask.depth_BL
    rows = zip(until.tolist(), depth.tolist(), strict=True)
    return torch.tensor(
        [
            [
                [k <= q < u[k] and (not mask.window or d[q] - d[k] < mask.window) for k in range(length)]
                for q in range(length)
            ]
            for u, d in rows
        ]
    )
