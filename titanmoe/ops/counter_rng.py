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
    """Hash what random numbers are for, such as ("weight", seed, "layers.0.moe.router.weight"), to a 63-bit key."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _shift(x: Tensor, n: int) -> Tensor:
    """Shift 64-bit integers right by n bits, filling with zeros (`>>` of torch fills with the sign)."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits, as int64, for each element of `index`: a pure function of the key and that element."""
    x = index.to(torch.int64) * _GAMMA + key
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniform(key: int | Tensor, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a uniform number in [0, 1) for each element of `index`, a multiple of 2^-24 (exact in float32).

    Args:
        key: a key from the function `key`.
        index: integers, such as positions in a tensor; equal ones get equal numbers.
        dtype: the dtype of the result; narrower ones than float32 round to it, up to 1.
    """
    return _shift(bits(key, index), 40).to(dtype) * 2.0**-24


def normal(key: int, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a number for each element of `index`: x of a standard normal pair (x, y) with x^2 + y^2 <= 9.

    Its variance is 0.949. Equal indices get equal numbers, computed in float64 and rounded to `dtype`.
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
