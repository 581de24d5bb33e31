"""A kernel that sums the entropy of a router's scores, in one pass over them.

Reference: `titanmoe.moe.layer_statistics.entropy_and_count`. A program has a few tokens and all their experts, and
writes its own two sums, which are added up afterwards, so no sum depends on the order of execution.

Shapes: T tokens, E experts (P: rounded up to a power of two), N programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmoe.ops.kernels.kernel_launch import cdiv, expert_tile, kernel

TILE = 4096
"""The scores per program."""


@triton.jit(do_not_specialize=["T"])
def _router_entropy(scores, valid, out, T, E: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr):
    t, e = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, P)[None, :]
    in_range = t < T
    s = tl.load(scores + t[:, None] * E + e, mask=in_range[:, None] & (e < E), other=0.0)
    if NORM:
        total = tl.sum(s, 1)[:, None]
        s = s / tl.where(in_range[:, None], total, 1.0)
    real = in_range & (tl.load(valid + t, mask=in_range, other=0) != 0)
    entropy = -tl.sum(tl.where(s > 0, s * tl.log(tl.where(s > 0, s, 1.0)), tl.where(s == s, 0.0, s)), 1)
    target = out + tl.program_id(0) * 2
    tl.store(target, tl.sum(tl.where(real, entropy, 0.0), 0).to(tl.float64))
    tl.store(target + 1, tl.sum(real.to(tl.float64), 0))


@kernel("titanmoe::entropy_and_count")
def entropy_and_count(scores_TE: Tensor, valid_T: Tensor, norm: bool) -> Tensor:
    """Return the sum of the tokens' score entropies in nats and the number of tokens, without padding, per program.

    The caller adds these over N.

    Args:
        scores_TE: the router scores of each token.
        valid_T: the mask of tokens: 0 for padding.
        norm: whether scores do not sum to 1 and have to be scaled.

    Returns:
        (N, 2) in float64: sum and number of each of N programs.
    """
    T, E = scores_TE.shape
    shape = expert_tile(E, TILE)
    programs = cdiv(T, shape["ROWS"])
    out = torch.empty(programs, 2, dtype=torch.float64, device=scores_TE.device)
    if T:
        _router_entropy[(programs,)](
            scores_TE.contiguous(), valid_T.contiguous(), out, T, **shape, NORM=norm, num_warps=4
        )  # fmt: skip
    return out


@entropy_and_count.register_fake
def _(scores_TE, valid_T, norm):
    T, E = scores_TE.shape
    return scores_TE.new_empty(cdiv(T, expert_tile(E, TILE)["ROWS"]), 2, dtype=torch.float64)
