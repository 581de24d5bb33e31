"""Causal attention for CPUs: block by block, a few matrix products each; no scores are kept for backward.

torch's own kernel for CPUs reaches a fifth of the machine's bf16 peak, and does not support values narrower than keys
(latent attention): there torch computes in float32 and keeps all scores. Here a block of QUERIES sees all keys up to
its end at once, so its softmax is complete; backward computes it again. As many heads are processed together as keep
SCORES scores in the cache. If there are several documents, a block only sees those that reach into it, so short ones
cost little.

As in any attention with plain bf16 products, scores and weights are rounded to bf16; softmax and all sums are wide.

Shapes: B samples, G key heads, g query heads for each of them, S positions, n key heads processed together, c a
block, k the keys that it sees, h key width, v value width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

QUERIES = 128
SCORES = 1 << 21


def _begins(document_S: Tensor) -> list[int]:
    """For each block: where the document of its first position begins."""
    place = torch.arange(len(document_S))
    begins = torch.ones_like(place, dtype=torch.bool)
    begins[1:] = document_S[1:] != document_S[:-1]
    return torch.where(begins, place, 0).cummax(0).values[::QUERIES].tolist()


def _hidden(first: int, end: int, low: int, document_S: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(c, k), added to scores: -inf for later positions and for those of another document."""
    hidden = torch.ones(end - first, end - low, dtype=torch.bool).triu(1 + first - low)
    if document_S is not None:
        hidden |= document_S[first:end].unsqueeze(1) != document_S[low:end]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


Block = tuple[slice, slice, Tensor]


def _blocks(S: int, document_S: Tensor | None, dtype: torch.dtype) -> Iterator[Block]:
    """Queries, the keys that they see, and which of those are hidden."""
    reads_documents = document_S is not None and not torch.compiler.is_compiling()  # a graph cannot depend on values
    begins = _begins(document_S) if reads_documents else [0] * -(-S // QUERIES)
    for first, low in zip(range(0, S, QUERIES), begins, strict=True):
        end = min(first + QUERIES, S)
        yield slice(first, end), slice(low, end), _hidden(first, end, low, document_S, dtype)


def _work(q_BGgSh: Tensor, document_BS: Tensor | None) -> Iterator[tuple[slice, slice, list[Block]]]:
    """Samples, key heads, blocks. With documents, each sample has its own blocks."""
    B, G, g, S, _ = q_BGgSh.shape
    together = max(SCORES // max(g * min(QUERIES, S) * S, 1), 1)
    samples = 1 if document_BS is not None else max(together // G, 1)
    blocks: list[Block] = []
    for sample in range(0, B, samples):
        if document_BS is not None or not blocks:
            blocks = list(_blocks(S, None if document_BS is None else document_BS[sample], q_BGgSh.dtype))
        for head in range(0, G, together):
            yield slice(sample, sample + samples), slice(head, head + together), blocks


def _shares(q_nRh: Tensor, k_nkh: Tensor, hidden: Tensor) -> Tensor:
    """(n, R, k), R the g * c queries stacked: softmax of the scores."""
    hidden = hidden.repeat(q_nRh.shape[1] // hidden.shape[0], 1)
    return torch.baddbmm(hidden, q_nRh, k_nkh.transpose(1, 2), alpha=q_nRh.shape[-1] ** -0.5).softmax(-1)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BGgSh, k_BGSh, v_BGSv, document_BS):
        B, G, g, S, _ = q_BGgSh.shape
        # As the output projection needs it: positions before heads.
        out = q_BGgSh.new_empty(B, S, G, g, v_BGSv.shape[-1]).permute(0, 2, 3, 1, 4)
        for samples, heads, blocks in _work(q_BGgSh, document_BS):
            q, k, v = (x[samples, heads].flatten(0, 1).contiguous() for x in (q_BGgSh, k_BGSh, v_BGSv))
            y = out[samples, heads]
            for queries, keys, hidden in blocks:
                share = _shares(q[:, :, queries].flatten(1, 2), k[:, keys], hidden)
                to = y[:, :, :, queries]
                to.copy_(torch.bmm(share, v[:, keys]).view(to.shape))
        ctx.save_for_backward(q_BGgSh, k_BGSh, v_BGSv, document_BS)
        return out

    @staticmethod
    def backward(ctx, grad_BGgSv):
        q_BGgSh, k_BGSh, v_BGSv, document_BS = ctx.saved_tensors
        (B, G, g, S, h), wide = q_BGgSh.shape, torch.promote_types(q_BGgSh.dtype, torch.float32)
        dq_BGgSh = q_BGgSh.new_empty(B, S, G, g, h).permute(0, 2, 3, 1, 4)
        dk_BGSh, dv_BGSv = (x.new_empty(B, S, G, x.shape[-1]).transpose(1, 2) for x in (k_BGSh, v_BGSv))
        for samples, heads, blocks in _work(q_BGgSh, document_BS):
            q, k, v = (x[samples, heads].flatten(0, 1).contiguous() for x in (q_BGgSh, k_BGSh, v_BGSv))
            dy, dq = grad_BGgSv[samples, heads].flatten(0, 1), dq_BGgSh[samples, heads]
            dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (k, v))
            for queries, keys, hidden in blocks:
                q_nRh, dy_nRv = q[:, :, queries].flatten(1, 2), dy[:, :, queries].flatten(1, 2)
                share = _shares(q_nRh, k[:, keys], hidden)
                dv[:, keys] += torch.bmm(share.transpose(1, 2), dy_nRv)
                dshare = torch.bmm(dy_nRv, v[:, keys].transpose(1, 2))
                dscore = torch._softmax_backward_data(dshare, share, -1, share.dtype)
                to = dq[:, :, :, queries]
                to.copy_(torch.bmm(dscore, k[:, keys]).mul_(h**-0.5).view(to.shape))
                dk[:, keys] += torch.bmm(dscore.transpose(1, 2), q_nRh)
            for sum_nSw, whole in (dk.mul_(h**-0.5), dk_BGSh), (dv, dv_BGSv):
                to = whole[samples, heads]
                to.copy_(sum_nSw.view(to.shape))
        return dq_BGgSh, dk_BGSh, dv_BGSv, None


def blocked_attention(q_BHSh: Tensor, k_BGSh: Tensor, v_BGSv: Tensor, document_BS: Tensor | None = None) -> Tensor:
    """(B, H, S, v). Every position sees itself and those before it, within its own document if documents are given."""
    q_BGgSh = q_BHSh.unflatten(1, (k_BGSh.shape[1], -1))
    return _Blocked.apply(q_BGgSh, k_BGSh, v_BGSv, document_BS).flatten(1, 2)
