"""Counted randomness: every random number is a pure function of a key and an index, never of what was drawn before.

So a number is the same on any rank, under any mapping, in a recomputed forward and after a resume. The generator is the
splitmix64 finaliser applied to (index * golden gamma + key); its integers are bit-equal on every device.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
_CHUNK = 1 << 18  # elements per pass, so that the temporaries stay in cache


def key(*parts: int | str) -> int:
    """Return a 63-bit key from what names the numbers, such as ("weight", seed, "layers.0.moe.router.weight")."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _shift(x: Tensor, n: int) -> Tensor:
    """Return the logical right shift; torch's is arithmetic."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits, as int64, for each index."""
    x = index.to(torch.int64) * _GAMMA + key
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniform(key: int | Tensor, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uniform numbers in [0, 1) for each index, from the top 24 bits (exact in float32)."""
    return _shift(bits(key, index), 40).to(dtype) * 2.0**-24


def normal(key: int, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers for each index, truncated at 3 standard deviations.

    Box-Muller from two 32-bit halves of the bits, with a bounded radius.
    """
    out = torch.empty(index.shape, dtype=dtype, device=index.device)
    flat_index, flat_out = index.reshape(-1), out.view(-1)
    for start in range(0, flat_index.numel(), _CHUNK):
        x = bits(key, flat_index[start : start + _CHUNK])
        # float64 inside: the same value to the last float32 bit whichever device computed it
        u = (_shift(x, 32).to(torch.float64) + 0.5) * 2.0**-32
        angle = (x & 0xFFFFFFFF).to(torch.float64) * (2.0 * torch.pi * 2.0**-32)
        # radius of a normal conditioned on radius <= 3: u scaled into [exp(-4.5), 1)
        radius = torch.sqrt(-2.0 * torch.log(u * (1.0 - 0.011108996538242306) + 0.011108996538242306))
        flat_out[start : start + _CHUNK] = (radius * torch.cos(angle)).to(dtype)
    return out
