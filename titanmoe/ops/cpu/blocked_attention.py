"""Causal attention for CPUs: block by block, a few matrix products each; no scores are kept for backward.

torch's own kernel for CPUs reaches a fifth of the machine's bf16 peak, and does not support values narrower than keys
(latent attention): there torch computes in float32 and keeps all scores. Here a block of QUERIES sees all keys up to
its end at once, so its softmax is complete; backward computes it again. As many heads are processed together as keep
SCORES scores in the cache. A block only sees the runs of keys that the mask shows to one of its queries, so short
documents cost little.

As in any attention with plain bf16 products, scores and weights are rounded to bf16; softmax and all sums are wide.

Shapes: B samples, G key heads, g query heads for each of them, S positions, n key heads processed together, c a
block, k the keys that it sees, h key width, v value width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from titanmoe.mask import Mask

QUERIES = 128
SCORES = 1 << 21


Block = tuple[slice, list[slice], Tensor]


def _blocks(S: int, mask: Mask, sample: int, dtype: torch.dtype) -> Iterator[Block]:
    """Queries, the runs of keys that they see, and (c, k), added to scores: -inf for what single queries do not see."""
    for first in range(0, S, QUERIES):
        queries = slice(first, min(first + QUERIES, S))
        runs = mask.key_runs(sample, first, queries.stop)
        own, cpu = slice(sample, sample + 1), torch.device("cpu")
        seen = torch.cat([mask.seen(own, queries, run, cpu)[0] for run in runs], 1)
        yield queries, runs, torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _work(q_BGgSh: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Iterable[Block]]]:
    """Yield samples, key heads and blocks. With documents, each sample has its own blocks.

    Those of a long sequence are made again for each group of heads, because together they take S * S / 2 numbers.
    """
    B, G, g, S, _ = q_BGgSh.shape
    together = max(SCORES // max(g * min(QUERIES, S) * S, 1), 1)
    samples = 1 if mask.until_BL is not None else max(together // G, 1)
    is_long = S * S > 2 * SCORES
    blocks: Iterable[Block] = ()
    for sample in range(0, B, samples):
        if not is_long and (mask.until_BL is not None or not blocks):
            blocks = list(_blocks(S, mask, sample, q_BGgSh.dtype))
        for head in range(0, G, together):
            if is_long:
                blocks = _blocks(S, mask, sample, q_BGgSh.dtype)
            yield slice(sample, sample + samples), slice(head, head + together), blocks


def _at(x_nSw: Tensor, runs: list[slice]) -> Tensor:
    return x_nSw[:, runs[0]] if len(runs) == 1 else torch.cat([x_nSw[:, run] for run in runs], 1)


def _add(x_nSw: Tensor, runs: list[slice], more_nkw: Tensor) -> None:
    for run, part in zip(runs, more_nkw.split([run.stop - run.start for run in runs], 1), strict=True):
        x_nSw[:, run] += part


def _shares(q_nRh: Tensor, k_nkh: Tensor, hidden: Tensor) -> Tensor:
    """(n, R, k), R the g * c queries stacked: softmax of the scores."""
    hidden = hidden.repeat(q_nRh.shape[1] // hidden.shape[0], 1)
    return torch.baddbmm(hidden, q_nRh, k_nkh.transpose(1, 2), alpha=q_nRh.shape[-1] ** -0.5).softmax(-1)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BGgSh, k_BGSh, v_BGSv, mask):
        B, G, g, S, _ = q_BGgSh.shape
        # As the output projection needs it: positions before heads.
        out = q_BGgSh.new_empty(B, S, G, g, v_BGSv.shape[-1]).permute(0, 2, 3, 1, 4)
        for samples, heads, blocks in _work(q_BGgSh, mask):
            q, k, v = (x[samples, heads].flatten(0, 1).contiguous() for x in (q_BGgSh, k_BGSh, v_BGSv))
            y = out[samples, heads]
            for queries, runs, hidden in blocks:
                share = _shares(q[:, :, queries].flatten(1, 2), _at(k, runs), hidden)
                to = y[:, :, :, queries]
                to.copy_(torch.bmm(share, _at(v, runs)).view(to.shape))
        ctx.save_for_backward(q_BGgSh, k_BGSh, v_BGSv)
        ctx.mask = mask
        return out

    @staticmethod
    def backward(ctx, grad_BGgSv):
        (q_BGgSh, k_BGSh, v_BGSv), mask = ctx.saved_tensors, ctx.mask
        (B, G, g, S, h), wide = q_BGgSh.shape, torch.promote_types(q_BGgSh.dtype, torch.float32)
        dq_BGgSh = q_BGgSh.new_empty(B, S, G, g, h).permute(0, 2, 3, 1, 4)
        dk_BGSh, dv_BGSv = (x.new_empty(B, S, G, x.shape[-1]).transpose(1, 2) for x in (k_BGSh, v_BGSv))
        for samples, heads, blocks in _work(q_BGgSh, mask):
            q, k, v = (x[samples, heads].flatten(0, 1).contiguous() for x in (q_BGgSh, k_BGSh, v_BGSv))
            dy, dq = grad_BGgSv[samples, heads].flatten(0, 1), dq_BGgSh[samples, heads]
            dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (k, v))
            for queries, runs, hidden in blocks:
                q_nRh, dy_nRv = q[:, :, queries].flatten(1, 2), dy[:, :, queries].flatten(1, 2)
                k_nkh = _at(k, runs)
                share = _shares(q_nRh, k_nkh, hidden)
                _add(dv, runs, torch.bmm(share.transpose(1, 2), dy_nRv))
                dshare = torch.bmm(dy_nRv, _at(v, runs).transpose(1, 2))
                dscore = torch._softmax_backward_data(dshare, share, -1, share.dtype)
                to = dq[:, :, :, queries]
                to.copy_(torch.bmm(dscore, k_nkh).mul_(h**-0.5).view(to.shape))
                _add(dk, runs, torch.bmm(dscore.transpose(1, 2), q_nRh))
            for sum_nSw, whole in (dk.mul_(h**-0.5), dk_BGSh), (dv, dv_BGSv):
                to = whole[samples, heads]
                to.copy_(sum_nSw.view(to.shape))
        return dq_BGgSh, dk_BGSh, dv_BGSv, None


def blocked_attention(q_BHSh: Tensor, k_BGSh: Tensor, v_BGSv: Tensor, mask: Mask) -> Tensor:
    """(B, H, S, v). The mask has no window."""
    q_BGgSh = q_BHSh.unflatten(1, (k_BGSh.shape[1], -1))
    return _Blocked.apply(q_BGgSh, k_BGSh, v_BGSv, mask).flatten(1, 2)
