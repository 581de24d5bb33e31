"""Shuffled order without an index: a permutation of any size, computed element by element in constant memory.

A balanced Feistel network permutes 0 ... 4^h - 1 whatever its round function. A number that lands outside the wanted
range goes through the network again until it falls inside, which makes a permutation of that range (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). 4^h is less than 4 times the size, so few numbers go through more than
twice.

Shapes: N elements of the permutation.
"""

from __future__ import annotations

import numpy as np
import torch

from titanmoe.ops.counter_rng import bits

ROUNDS = 4


def permute(key: int, number_N: np.ndarray, size: int) -> np.ndarray:
    """Return the images of some numbers under a pseudorandom permutation of 0 ... size - 1.

    Args:
        key: selects the permutation.
        number_N: the numbers, each in 0 ... size - 1.
        size: size of the permutation.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    out_N = torch.as_tensor(number_N, dtype=torch.int64).clone()
    outside = torch.arange(len(out_N))
    while len(outside):
        out_N[outside] = _feistel(key, out_N[outside], half)
        outside = outside[out_N[outside] >= size]
    return out_N.numpy()


def _feistel(key: int, x_N: torch.Tensor, half: int) -> torch.Tensor:
    """Return the numbers after one pass through the Feistel network, a permutation of 0 ... 4^half - 1."""
    mask = (1 << half) - 1
    high_N, low_N = x_N >> half, x_N & mask
    for round_ in range(ROUNDS):
        high_N, low_N = low_N, high_N ^ (bits(key, low_N * ROUNDS + round_) & mask)
    return high_N << half | low_N
