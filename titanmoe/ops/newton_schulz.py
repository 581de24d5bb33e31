"""The nearest matrix with orthonormal rows or columns, by Newton-Schulz steps: X <- a X + b (X X') X + c (X X')^2 X.

Muon calls it (titanmoe.train.optimizers.muon). Two kinds of coefficients (a, b, c):

    classic          Keller Jordan's, alike in every step; singular values end between 0.68 and 1.13, if they began
                     above 0.01 of the norm
    polar_express    those of arXiv 2505.16932, each step's the best for what the one before leaves, with its divisors
                     against rounding
"""

from __future__ import annotations

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

CLASSIC = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
LATER = (1.875, -1.25, 0.375)
"""The coefficients of every step after those of POLAR_EXPRESS."""
SAFETY = 1.01
"""The divisor of singular values against rounding, as in arXiv 2505.16932."""


def step_coefficients(name: str, steps: int) -> Coefficients:
    """Return the coefficients (a, b, c) of each Newton-Schulz step.

    "classic" repeats one triple. "polar_express" has seven, divided by powers of SAFETY, then repeats the triple LATER.

    Args:
        name: "classic" or "polar_express".

    Raises:
        ValueError: the name is another.
    """
    if name == "classic":
        return (CLASSIC,) * steps
    if name != "polar_express":
        raise ValueError(f'there are no coefficients {name!r} of Newton-Schulz steps: use "classic" or "polar_express"')
    safe = tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS)
    return (safe + (LATER,) * steps)[:steps]


def normalize(x: Tensor, eps_norm: Tensor | float) -> Tensor:
    """Return each matrix of x (..., rows, columns) divided by its Frobenius norm plus eps_norm; 0 / 0 is 0."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    norm = norm + eps_norm
    return (x / norm.where(norm > 0, 1)).to(x.dtype)


def orthogonalize(x: Tensor, steps: Coefficients, eps_norm: Tensor | float) -> Tensor:
    """Approximate, for each matrix of a stack, the nearest matrix with orthonormal rows or columns, in its dtype.

    Args:
        x: a matrix, or a stack of matrices (n, rows, columns); tall ones are transposed for the products.
        steps: the coefficients of each Newton-Schulz step.
        eps_norm: what is added to the norm that a matrix is divided by first.
    """
    upright = x.shape[-2] > x.shape[-1]
    x = normalize(x.mT if upright else x, eps_norm)
    for a, b, c in steps:
        gram = x @ x.mT
        if x.dim() == 3:
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        else:
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if upright else x


def orthogonalizing_factor(gram: Tensor, steps: Coefficients, eps_norm: Tensor | float) -> Tensor:
    """Return the matrix F for which F X is the result of `orthogonalize`, given only X X' of a wide matrix X.

    X X' has the square of X's condition number, so use float32 at least.

    Args:
        gram: X X', or a stack of such matrices.
        steps: the coefficients of each Newton-Schulz step.
        eps_norm: what is added to the norm of X.
    """
    norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0).sqrt()[..., None, None] + eps_norm
    norm = norm.where(norm > 0, 1)
    gram = gram / norm / norm
    out = one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    for a, b, c in steps:
        step = a * one + b * gram + c * gram @ gram
        gram, out = step @ gram @ step, step @ out
    return (out / norm).to(gram.dtype)
