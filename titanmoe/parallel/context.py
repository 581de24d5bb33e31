"""Context parallel attention: one sequence sharded over the ranks of cp.

With zigzag placement rank r of n has chunks r and 2n-1-r, for equal work under the causal mask. `attend` calls one of:

    ring        keys and values go around the ring of ranks, in backward too; partial results merge by their log-sum-exp
    allgather   every rank gets the keys and values of the full sequence
    ulysses     an all-to-all turns sequence shards into head shards and back; in between, attention is the usual one

Shapes: B samples, L sequence, S = L / cp positions of this rank, c chunk, H query heads and G key heads of this rank, h
head width, which may differ for values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.comm.all_to_all import all_to_all_autograd
from titanmoe.comm.collectives import NO_GROUP, Group, all_gather_autograd, launch_all_to_all, wait
from titanmoe.config.schema import Parallelism
from titanmoe.mask import BlockPair, Mask
from titanmoe.models.attention import causal_attention
from titanmoe.models.layers import promote
from titanmoe.ops import device
from titanmoe.parallel.attention_block import block, block_backward

LseCallback = Callable[[Tensor], None] | None
"""Function that gets the log-sum-exp of each query that this rank computes, (B, H, S); None if nobody needs it.

Here, unlike in torch's ring and flex_attention, sinks are in it.
"""


class Placement(NamedTuple):
    """The chunks of the sequence that each rank of cp has."""

    size: int
    """Number of ranks of cp."""
    zigzag: bool
    """Whether rank r of n has chunks r and 2n-1-r, instead of chunk r alone of n."""

    @property
    def chunks(self) -> int:
        """Number of chunks that a sequence is split into, over all ranks."""
        return self.size * (2 if self.zigzag and self.size > 1 else 1)

    def chunks_of(self, rank: int) -> list[int]:
        """Return the numbers (0 is the first in the sequence) of a rank's chunks, in the order in which it has them."""
        return [rank, 2 * self.size - 1 - rank] if self.zigzag and self.size > 1 else [rank]

    def order(self) -> list[int]:
        """Return the numbers of all chunks, in the order that concatenating the ranks' slices gives."""
        return [chunk for rank in range(self.size) for chunk in self.chunks_of(rank)]

    def rank_slice(self, x_BL: Tensor, rank: int) -> Tensor:
        """Return a rank's slice (B, S) of a tensor whose dim 1 is the sequence, chunk after chunk.

        `chunks` must divide the sequence's length. The slice is a copy, but with one rank the tensor itself.
        """
        if self.size == 1:
            return x_BL
        chunks = x_BL.chunk(self.chunks, 1)
        return torch.cat([chunks[chunk] for chunk in self.chunks_of(rank)], 1)

    def to_sequence_order(self, x: Tensor) -> Tensor:
        """Reorder the slices of all ranks, concatenated along dim 1 in rank order, to the order of the sequence."""
        if not self.zigzag:
            return x
        chunks = dict(zip(self.order(), x.chunk(self.chunks, 1), strict=True))
        return torch.cat([chunks[chunk] for chunk in range(self.chunks)], 1)

    def to_rank_order(self, x: Tensor) -> Tensor:
        """Reorder a full sequence along dim 1 to the slices of all ranks, concatenated in rank order."""
        if not self.zigzag:
            return x
        chunks = x.chunk(self.chunks, 1)
        return torch.cat([chunks[chunk] for chunk in self.order()], 1)

    def pairs(self, mask: Mask, q: Tensor, rank: int, key_chunks: Sequence[int]) -> list[BlockPair]:
        """Return the blocks of queries of a rank, each with a block of keys that some of these queries see.

        Empty if the mask hides all of the keys.

        Args:
            q: the rank's queries (B, H, S, h); only S is used.
            rank: the rank of cp that has the queries.
            key_chunks: numbers of the chunks that the keys are from.
        """
        chunks = self.chunks_of(rank)
        return mask.pairs(q.shape[2] // len(chunks), self.chunks, chunks, key_chunks)


def placement(options: Parallelism) -> Placement:
    """Return the placement of cp's ranks that a recipe's [parallelism] asks for."""
    return Placement(options.cp, options.cp_placement == "zigzag")


def _forward_pairs(
    q: Tensor, k: Tensor, v: Tensor, pairs: list[BlockPair], mask: Mask, *, out: Tensor, lse: Tensor
) -> None:
    """Merge attention of these pairs of blocks into `out` (B, H, S, h) and `lse` (B, H, S), in place.

    Both are in float32 at least, and begin as attention to no key, or as merged so far. q are this rank's queries, k
    and v the keys and values that the pairs index.
    """
    for pair in pairs:
        rows, columns = (pair.samples, slice(None), pair.rows), (pair.samples, slice(None), pair.columns)
        o, s = block(q[rows], k[columns], v[columns], mask.bias(pair, q), pair.causal)
        before = lse[rows]
        after = torch.logaddexp(before, s)
        pivot = after.masked_fill(after == -torch.inf, 0)  # no key seen yet
        out[rows] = out[rows] * (before - pivot).exp().unsqueeze(-1) + o * (s - pivot).exp().unsqueeze(-1)
        lse[rows] = after


def _backward_pairs(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: list[BlockPair],
    *,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    sums: Sequence[Tensor],
) -> None:
    """Add the gradients through attention of these pairs of blocks to the sums, in place.

    All but lse are (B, heads, positions, h). The sums are in float32 at least.

    Args:
        grad: gradient of `out`.
        q: this rank's queries.
        k: the keys that the pairs index; v has their values.
        out: final output, of all keys.
        lse: its log-sum-exp (B, H, S), of all keys and the sink.
        sums: sums of the gradients of q, k and v.
    """
    dq, dk, dv = sums
    for pair in pairs:
        rows, columns = (pair.samples, slice(None), pair.rows), (pair.samples, slice(None), pair.columns)
        final = {"out": out[rows].contiguous(), "lse": lse[rows].contiguous(), "causal": pair.causal}
        inputs = grad[rows].contiguous(), q[rows], k[columns], v[columns]
        gq, gk, gv = block_backward(*inputs, mask.bias(pair, q), **final)
        dq[rows] += gq
        dk[columns] += gk
        dv[columns] += gv


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _start(q: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, S, h) and log-sum-exp (B, H, S) to merge keys into: of no key, or of the sink alone.

    Args:
        q: this rank's queries (B, H, S, h), for shape, dtype and device.
        v: values, for their width.
        sinks: logit of each head's sink, (H,); None without.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
    return out, lse if sinks is None else lse.copy_(sinks.view(-1, 1))


def _cast(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `out` in this dtype, for the forward of an autograd.Function to return.

    Where there is nothing to cast, out itself and not `out.to(dtype)`: torch 2.11 drops the gradient of a compiled
    autograd.Function whose result comes from an operation that returned its own input.
    """
    return out if out.dtype == dtype else out.to(dtype)


def _sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks' logits s, (H,), or None without sinks.

    It is the sum over this rank's queries, not yet over cp, of p * (0 - grad . out), where p = exp(s - lse); lse
    includes the sinks.
    """
    if sinks is None:
        return None
    probability = torch.exp(promote(sinks).view(-1, 1) - lse)
    return -(probability * (promote(grad) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


class _Gathered(torch.autograd.Function):
    """Attention of this rank's query chunks to all key chunks, given in the order of the sequence."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, placement, rank, mask, report_lse):
        ctx.pairs, ctx.mask = placement.pairs(mask, q, rank, range(placement.chunks)), mask
        out, lse = _start(q, v, sinks)
        _forward_pairs(q, k, v, ctx.pairs, mask, out=out, lse=lse)
        if report_lse is not None:
            report_lse(lse)
        out = _cast(out, q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = _wide_zeros(q), _wide_zeros(k), _wide_zeros(v)
        _backward_pairs(grad, q, k, v, ctx.pairs, mask=ctx.mask, out=out, lse=lse, sums=(dq, dk, dv))
        dsinks = _sinks_grad(grad, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None


def _pass_on(x: Tensor, group: Group) -> Tensor:
    """Start sending x to the next rank of the ring; return the previous rank's x, which is still to be waited for.

    Collective over the group. All ranks' x have one shape; dim 0 is what is sent.
    """
    send, receive = [0] * group.size, [0] * group.size
    send[(group.rank + 1) % group.size] = receive[(group.rank - 1) % group.size] = x.shape[0]
    return launch_all_to_all(x, send, receive, group)


def _pack(*parts: Tensor) -> Tensor:
    """Return keys and values in one tensor of one dim, to be sent as one message."""
    return torch.cat([part.flatten() for part in parts])


def _unpack(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values out of a message of `_pack`, as views with the shapes of k and v."""
    return kv[: k.numel()].view(k.shape), kv[k.numel() :].view(v.shape)


class _Ring(torch.autograd.Function):
    """Attention of this rank's queries to keys and values that go around the ring of ranks."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, placement, group, mask, report_lse):
        out, lse = _start(q, v, sinks)
        kv = _pack(k, v)
        for hop in range(group.size):
            next_kv = _pass_on(kv, group) if hop < group.size - 1 else None
            pairs = placement.pairs(mask, q, group.rank, placement.chunks_of((group.rank - hop) % group.size))
            _forward_pairs(q, *_unpack(kv, k, v), pairs, mask, out=out, lse=lse)
            if next_kv is not None:
                kv = wait(next_kv, group)
        if report_lse is not None:
            report_lse(lse)
        out = _cast(out, q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.placement, ctx.group, ctx.mask = placement, group, mask
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        placement, group, mask = ctx.placement, ctx.group, ctx.mask
        # Of a message of k and v alone a compiler would make one with forward's, or move it to the forward graph, and
        # not on all ranks alike, because not all use what arrives.
        dq, kv = _wide_zeros(q), _pack(k, v, grad.flatten()[:0])
        dkv = _wide_zeros(kv)
        for hop in range(group.size):
            next_kv = _pass_on(kv, group) if hop < group.size - 1 else None
            pairs = placement.pairs(mask, q, group.rank, placement.chunks_of((group.rank - hop) % group.size))
            sums = dq, *_unpack(dkv, k, v)
            _backward_pairs(grad, q, *_unpack(kv, k, v), pairs, mask=mask, out=out, lse=lse, sums=sums)
            # The gradients follow their keys; after the last hop they are back on the keys' own rank.
            dkv = wait(_pass_on(dkv, group), group)
            if next_kv is not None:
                kv = wait(next_kv, group)
        dk, dv = _unpack(dkv.to(k.dtype), k, v)
        return dq.to(q.dtype), dk, dv, _sinks_grad(grad, out, lse, sinks), None, None, None, None


def heads_first(*xs: Tensor) -> list[Tensor]:
    """Return views of (B, S, H, h) tensors as (B, H, S, h)."""
    return [x.transpose(1, 2) for x in xs]


def ring_attention(
    q_BSHh: Tensor,
    k_BSGh: Tensor,
    v_BSGh: Tensor,
    mask: Mask,
    sinks_H: Tensor | None = None,
    report_lse: LseCallback = None,
    *,
    placement: Placement,
    group: Group,
) -> Tensor:
    """Return attention of this rank's queries to the full sequence; keys and values go around the ring of ranks.

    The result is (B, S, H, width of a value). Collective over cp. Differentiable.

    Args:
        sinks_H: logit of one more key of each head, whose value is zero; None without.
        report_lse: gets the log-sum-exp of each query (B, H, S), sinks included.
    """
    q, k, v = heads_first(q_BSHh, k_BSGh, v_BSGh)
    return _Ring.apply(q, k, v, sinks_H, placement, group, mask, report_lse).transpose(1, 2)


def allgather_attention(
    q_BSHh: Tensor,
    k_BSGh: Tensor,
    v_BSGh: Tensor,
    mask: Mask,
    sinks_H: Tensor | None = None,
    report_lse: LseCallback = None,
    *,
    placement: Placement,
    group: Group,
) -> Tensor:
    """Return attention of this rank's queries to the full sequence; every rank gathers all keys and values.

    The result is (B, S, H, width of a value). Collective over cp. Differentiable.

    Args:
        sinks_H: logit of one more key of each head, whose value is zero; None without.
        report_lse: gets the log-sum-exp of each query (B, H, S), sinks included.
    """
    k, v = (placement.to_sequence_order(all_gather_autograd(x, 1, group)) for x in (k_BSGh, v_BSGh))
    q, k, v = heads_first(q_BSHh, k, v)
    return _Gathered.apply(q, k, v, sinks_H, placement, group.rank, mask, report_lse).transpose(1, 2)


def ulysses_attention(
    q_BSHh: Tensor,
    k_BSGh: Tensor,
    v_BSGh: Tensor,
    mask: Mask,
    sinks_H: Tensor | None = None,
    report_lse: LseCallback = None,
    *,
    placement: Placement,
    group: Group,
    full_attention: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return attention of this rank's queries to the full sequence, computed with heads sharded over cp.

    The result is (B, S, H, width of a value). Collective over cp: an all-to-all turns shards of the sequence into
    shards of the heads, another turns the result back. Differentiable. cp has to divide H; key heads are repeated until
    it divides them, which makes their messages larger.

    Args:
        sinks_H: logit of one more key of each head, whose value is zero; None without.
        report_lse: gets the log-sum-exp of the full sequence's queries for this rank's heads, (B, H / cp, L).
        full_attention: computes attention over the full sequence for this rank's heads, with the arguments of
            `full_sequence_attention`, which it replaces; None for that.
    """
    # Key heads are repeated until cp divides their number.
    heads = math.lcm(k_BSGh.shape[2], group.size)
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k_BSGh, v_BSGh))
    q, k, v = (placement.to_sequence_order(_swap(x, 2, 1, group)) for x in (q_BSHh, k, v))
    if sinks_H is not None:
        sinks_H = sinks_H.chunk(group.size)[group.rank]
    out = (full_attention or full_sequence_attention)(q, k, v, mask, sinks_H, report_lse)
    return _swap(placement.to_rank_order(out), 1, 2, group)


blockwise_attention = partial(allgather_attention, placement=Placement(1, zigzag=False), group=NO_GROUP)
"""Attention over the full sequence on this rank, block by block: never all logits in memory."""


def full_sequence_attention(
    q_BLHh: Tensor,
    k_BLGh: Tensor,
    v_BLGh: Tensor,
    mask: Mask,
    sinks_H: Tensor | None = None,
    report_lse: LseCallback = None,
) -> Tensor:
    """Return attention over full sequences on one rank, (B, L, H, width of a value), without communication.

    Differentiable. Computed block by block, never with all logits in memory, if there are windows, sinks or a
    `report_lse`, or on a CPU documents; else by torch's scaled_dot_product_attention, documents as a dense mask.

    Args:
        sinks_H: logit of one more key of each head, whose value is zero; None without.
        report_lse: gets the log-sum-exp of each query (B, H, L), sinks included.
    """
    inputs = (q_BLHh, k_BLGh, v_BLGh, mask, sinks_H)
    # torch's kernel for CPUs computes what a mask hides.
    hides = mask.until_BL is not None and device.choose(q_BLHh, False, cpu=True, compiled=True)
    if hides or mask.window or sinks_H is not None or report_lse is not None:
        return blockwise_attention(*inputs, report_lse)
    return causal_attention(*inputs)


def _swap(x: Tensor, scatter_dim: int, gather_dim: int, group: Group) -> Tensor:
    """Scatter a dim of x over ranks and gather another, in rank order. Collective over the group, differentiable.

    Args:
        x: a tensor whose `scatter_dim` the number of ranks divides.
        scatter_dim: the dim of which each rank gets a chunk.
        gather_dim: the dim along which the ranks' chunks are concatenated.
    """
    chunks = all_to_all_autograd(torch.cat(x.chunk(group.size, scatter_dim)), group).chunk(group.size)
    return torch.cat(chunks, gather_dim)


OVER_CP = {"ring": ring_attention, "allgather": allgather_attention, "ulysses": ulysses_attention}
"""Functions that compute context parallel attention, by parallelism.cp_kind."""
