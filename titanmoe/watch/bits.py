"""A number that two tensors share if they have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Words hashed at a time, which take three times their size for a moment."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(tensor: Tensor) -> Tensor:
    """Its bits as integers, eight bytes each if they come out even."""
    flat = tensor.detach().reshape(-1)
    if flat.nbytes % 8:
        return flat.view(WORDS[flat.element_size()])
    if flat.data_ptr() % 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """The sum, modulo 2**64, of all words times odd numbers, so that one changed bit always changes it; on the device.

    Words whose places are exchanged change it too. Nothing waits for it.
    """
    whole = words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not whole.numel():
        return total
    odd = torch.arange(1, 2 * min(BLOCK, whole.numel()), 2, device=tensor.device)
    for number, block in enumerate(whole.split(BLOCK)):
        total += (block * odd[: block.numel()]).sum() * (2 * number + 1)
    return total


@torch.no_grad()
def combined(prints: list[Tensor]) -> Tensor:
    """Of several fingerprints in order."""
    return (torch.stack(prints) * torch.arange(1, 2 * len(prints), 2, device=prints[0].device)).sum()
