"""One number for the bits of a tensor: equal for equal tensors."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 18
"""How many words are hashed at a time. They briefly need three times their size in memory."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, of eight bytes each if its size is a multiple of that."""
    flat = tensor.detach().reshape(-1)
    if flat.nbytes % 8:
        return flat.view(WORDS[flat.element_size()])
    if flat.data_ptr() % 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """The sum of all words, each times its own odd number, modulo 2**64: one changed bit always changes it.

    Words that swap places change it too. It stays on the device, and the host does not wait for it.
    """
    integers = words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not integers.numel():
        return total
    odd = torch.arange(1, 2 * min(BLOCK, integers.numel()), 2, device=tensor.device)
    for number, block in enumerate(integers.split(BLOCK)):
        total += (block * odd[: block.numel()]).sum() * (2 * number + 1)
    return total


@torch.no_grad()
def combine_fingerprints(fingerprints: list[Tensor]) -> Tensor:
    """One fingerprint of several, in their order."""
    return (torch.stack(fingerprints) * torch.arange(1, 2 * len(fingerprints), 2, device=fingerprints[0].device)).sum()
