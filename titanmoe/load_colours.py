"""Colours of an expert's load relative to the mean of its layer: blue below, red above, on a logarithmic scale.

Used by TensorBoard's images and the report.
"""

from __future__ import annotations

import numpy as np

LOW, HIGH = np.array([42, 120, 214.0]), np.array([214, 59, 45.0])
MEAN = np.array([240, 239, 236.0])
DOUBLINGS = 2.0
"""Doublings from the mean to the full colour: a quarter of the mean or less, four times the mean or more."""


def strength(ratio: np.ndarray) -> np.ndarray:
    """Return how strongly to colour ratios of experts' loads to the mean load of their layer; any shape.

    -1 for a quarter of the mean load or less, 0 for the mean, 1 for four times or more; logarithmic in between.
    """
    return np.clip(np.log2(np.maximum(ratio, 2**-DOUBLINGS)) / DOUBLINGS, -1, 1)


def opaque_colours(ratio: np.ndarray) -> np.ndarray:
    """Return a colour for each ratio of an expert's load to the mean as RGB bytes (..., 3), for light backgrounds."""
    amount = np.abs(strength(ratio))[..., None]
    end = np.where((ratio < 1)[..., None], LOW, HIGH)
    return (MEAN * (1 - amount) + end * amount).round().astype(np.uint8)


def transparent_colours(ratio: np.ndarray) -> np.ndarray:
    """Return a colour for each ratio of an expert's load to the mean as RGBA bytes (..., 4), transparent at 1."""
    end = np.where((ratio < 1)[..., None], LOW, HIGH)
    alpha = 255 * np.abs(strength(ratio))[..., None]
    return np.concatenate([end, alpha], -1).round().astype(np.uint8)
