"""Colours for an expert's load: blue below the mean of its layer, red above, on a logarithmic scale."""

from __future__ import annotations

import numpy as np

LOW, HIGH = np.array([42, 120, 214.0]), np.array([214, 59, 45.0])
MEAN = np.array([240, 239, 236.0])
DOUBLINGS = 2.0
"""A quarter of the mean or less, and four times the mean or more, have the full colour."""


def strength(share: np.ndarray) -> np.ndarray:
    """-1 to 1 for the ratio of a load to the mean."""
    return np.clip(np.log2(np.maximum(share, 2**-DOUBLINGS)) / DOUBLINGS, -1, 1)


def colour_share(share: np.ndarray) -> np.ndarray:
    """(..., 3) bytes, on a light background."""
    amount = np.abs(strength(share))[..., None]
    end = np.where((share < 1)[..., None], LOW, HIGH)
    return (MEAN * (1 - amount) + end * amount).round().astype(np.uint8)


def colour_share_clear(share: np.ndarray) -> np.ndarray:
    """(..., 4) bytes, transparent at the mean, for light and dark backgrounds."""
    end = np.where((share < 1)[..., None], LOW, HIGH)
    alpha = 255 * np.abs(strength(share))[..., None]
    return np.concatenate([end, alpha], -1).round().astype(np.uint8)
