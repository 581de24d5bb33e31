"""Causal attention for CPUs: block by block, each block a few matrix products; no scores are kept for backward.

torch's own kernel for CPUs reaches a fifth of the machine's bf16 products, and where values are narrower than keys
(latent attention) there is none: it computes in float32 and keeps all scores. Here a block of BLOCK queries meets the
keys up to its end at once. Backward goes over blocks of keys with the final log-sum-exp, so that the gradients of keys
and values are each one product; only those of queries are summed over blocks, in float32 or wider. Where there are
several documents, a block meets no more than those that reach into it, so that short ones cost little.

As in any attention of plain bf16 products, scores are rounded to bf16; softmax and all sums are wide.

Shapes: B samples, G key heads, g query heads for each of them, S positions, c a block, h key width, v value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def _rows(x_BGgSh: Tensor, first: int, end: int) -> Tensor:
    """(B * G, g * c, h): the query heads of one key head under each other, so that keys need no copies."""
    return x_BGgSh[:, :, :, first:end].flatten(2, 3).flatten(0, 1)


def _hidden(document_BS: Tensor | None, queries: slice, keys: slice) -> Tensor | None:
    """(B, 1, 1, queries, keys): what lies in another document."""
    if document_BS is None:
        return None
    return (document_BS[:, queries].unsqueeze(2) != document_BS[:, keys].unsqueeze(1))[:, None, None]


def _reach(document_BS: Tensor | None, S: int) -> tuple[list[int], list[int]]:
    """Of each block: where the first document that reaches into it begins, where the last one ends, in any sample."""
    blocks = -(-S // BLOCK)
    if document_BS is None or torch.compiler.is_compiling():  # a graph cannot depend on values
        return [0] * blocks, [S] * blocks
    place = torch.arange(S)
    begins_BS = torch.ones_like(document_BS, dtype=torch.bool)
    begins_BS[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
    begin_BS = torch.where(begins_BS, place, 0).cummax(1).values
    # A document ends where the next begins: read from behind.
    ends_BS = torch.cat((begins_BS[:, 1:], begins_BS.new_ones(len(begins_BS), 1)), 1)
    end_BS = torch.where(ends_BS, place + 1, S).flip(1).cummin(1).values.flip(1)
    last = (place[::BLOCK] + BLOCK - 1).clamp(max=S - 1)
    return begin_BS[:, ::BLOCK].amin(0).tolist(), end_BS[:, last].amax(0).tolist()


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BGgSh, k_BGSh, v_BGSv, document_BS):
        B, G, g, S, h = q_BGgSh.shape
        wide = torch.promote_types(q_BGgSh.dtype, torch.float32)
        k, v = k_BGSh.flatten(0, 1), v_BGSv.flatten(0, 1)
        out = q_BGgSh.new_empty(B, G, g, S, v.shape[-1])
        lse, scale = torch.empty(B, G, g, S, 1, dtype=wide), h**-0.5
        begins, ctx.ends = _reach(document_BS, S)
        for first, low in zip(range(0, S, BLOCK), begins, strict=True):
            end = min(first + BLOCK, S)
            score = torch.bmm(_rows(q_BGgSh, first, end), k[:, low:end].transpose(1, 2)).to(wide)
            score = score.view(B, G, g, end - first, end - low)
            later = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
            score[..., first - low :].masked_fill_(later, -torch.inf)
            if document_BS is not None:
                score.masked_fill_(_hidden(document_BS, slice(first, end), slice(low, end)), -torch.inf)
            top = score.amax(-1, keepdim=True)
            weights = score.sub_(top).mul_(scale).exp_()
            total = weights.sum(-1, keepdim=True)
            lse[:, :, :, first:end] = top * scale + total.log()
            # Divided after the product, which is narrower.
            y = torch.bmm(weights.to(v.dtype).view(B * G, -1, end - low), v[:, low:end]).view(B, G, g, end - first, -1)
            out[:, :, :, first:end] = y / total
        ctx.save_for_backward(q_BGgSh, k_BGSh, v_BGSv, document_BS, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_BGgSv):
        q_BGgSh, k_BGSh, v_BGSv, document_BS, out, lse = ctx.saved_tensors
        B, G, g, S, h = q_BGgSh.shape
        k, v, scale = k_BGSh.flatten(0, 1), v_BGSv.flatten(0, 1), h**-0.5
        dot = (grad_BGgSv.to(lse.dtype) * out).sum(-1, keepdim=True)
        dq = torch.zeros(B, G, g, S, h, dtype=lse.dtype)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for first, high in zip(range(0, S, BLOCK), ctx.ends, strict=True):
            end, left = min(first + BLOCK, S), high - first
            q_rows, grad_rows = _rows(q_BGgSh, first, high), _rows(grad_BGgSv, first, high)
            k_c, v_c = k[:, first:end], v[:, first:end]
            score = torch.bmm(q_rows, k_c.transpose(1, 2)).view(B, G, g, left, -1)
            weights = score.to(lse.dtype).mul_(scale).sub_(lse[:, :, :, first:high]).exp_()
            later = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
            weights[:, :, :, : end - first].masked_fill_(later, 0)
            if document_BS is not None:
                weights.masked_fill_(_hidden(document_BS, slice(first, high), slice(first, end)), 0)
            narrow = weights.view(B * G, g * left, -1).to(v.dtype)
            dv[:, first:end] = torch.bmm(narrow.transpose(1, 2), grad_rows)
            dscore = torch.bmm(grad_rows, v_c.transpose(1, 2)).to(lse.dtype).view_as(weights)
            dscore = dscore.sub_(dot[:, :, :, first:high]).mul_(weights).to(k.dtype).view(B * G, g * left, -1)
            dk[:, first:end] = torch.bmm(dscore.transpose(1, 2), q_rows).mul_(scale)
            dq[:, :, :, first:high] += torch.bmm(dscore, k_c).view(B, G, g, left, h)
        return dq.mul_(scale).to(q_BGgSh.dtype), dk.view(B, G, S, h), dv.view_as(v_BGSv), None


def blocked_attention(q_BHSh: Tensor, k_BGSh: Tensor, v_BGSv: Tensor, document_BS: Tensor | None = None) -> Tensor:
    """(B, H, S, v). Every position sees itself and those before it, of its own document where documents are given."""
    q_BGgSh = q_BHSh.unflatten(1, (k_BGSh.shape[1], -1))
    return _Blocked.apply(q_BGgSh, k_BGSh, v_BGSv, document_BS).flatten(1, 2)
