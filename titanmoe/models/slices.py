"""A loss from slices of the logits, so that they are never whole, and the rows of a vocabulary that is split over tp.

Shapes: T tokens, D model, V this rank's vocabulary, v a slice of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanmoe.comm.collectives import Group
from titanmoe.models.layers import promote


def own_rows(ids: Tensor, size: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Row numbers within this rank's piece of the vocabulary (0 for ids of other ranks), and which ids are its own."""
    row = ids - tp.rank * size
    is_own = (row >= 0) & (row < size)
    return row.where(is_own, 0), is_own


def slices(weight_VD: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """At most that many. The width of wide ones is a multiple of 128, since products on GPUs are slow if rows of logits
    are not aligned."""
    width = -(-weight_VD.shape[0] // chunks)
    return weight_VD.split(width if width < 1024 else width + -width % 128)


def sum_slice(
    logits_Tv: Tensor,
    row_T: Tensor,
    begin: int,
    top_T: Tensor,
    total_T: Tensor,
    label_logit_T: Tensor,
    weighted_T: Tensor | None = None,
) -> None:
    """Adds a slice, whose first column is number `begin`, to each token's largest logit, the sum of exp(logit -
    largest), the logit of its label and, for the entropy, the sum of exp(logit - largest) * (logit - largest). The
    logits are overwritten.
    """
    logits_Tv = promote(logits_Tv)
    place_T = (row_T - begin).clamp(0, logits_Tv.shape[1] - 1)
    within_T = place_T == row_T - begin
    label_logit_T += logits_Tv.gather(1, place_T.unsqueeze(1)).squeeze(1).where(within_T, 0)
    higher_T = torch.maximum(top_T, logits_Tv.amax(1))
    if weighted_T is not None:
        weighted_T.copy_(lowered(weighted_T, total_T, top_T - higher_T))
    total_T *= torch.exp(top_T - higher_T)
    logits_Tv.sub_(higher_T.unsqueeze(1))
    if weighted_T is not None:
        weighted_T += (logits_Tv.exp() * logits_Tv).sum(1)
    total_T += logits_Tv.exp_().sum(1)
    top_T.copy_(higher_T)


def lowered(weighted_T: Tensor, total_T: Tensor, by_T: Tensor) -> Tensor:
    """The sum of exp(l) * l after all l have changed by this number, which is -inf where nothing was summed yet."""
    return (torch.exp(by_T) * (weighted_T + total_T * by_T)).where(total_T > 0, 0)


def slice_backward(logits_Tv: Tensor, row_T: Tensor, begin: int, log_total_T: Tensor, scale_T: Tensor) -> Tensor:
    """The gradients of a slice's logits, which are overwritten."""
    grad_Tv = promote(logits_Tv).sub_(log_total_T.unsqueeze(1)).exp_()
    place_T = (row_T - begin).clamp(0, grad_Tv.shape[1] - 1)
    grad_Tv.scatter_add_(1, place_T.unsqueeze(1), -(place_T == row_T - begin).unsqueeze(1).to(grad_Tv.dtype))
    return grad_Tv.mul_(scale_T.unsqueeze(1)).to(logits_Tv.dtype)
