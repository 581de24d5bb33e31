"""Pieces of context parallel attention: blocks against plain operations, merging, placement of chunks,
the head swap.
"""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import world
from tests.support import tolerances
from tests.support.masks import mask_of, tree_mask
from titanmoe.comm.collectives import Group
from titanmoe.mask import Mask
from titanmoe.models.attention import causal_attention, plain_attention
from titanmoe.parallel.attention_block import block, block_backward, block_reference
from titanmoe.parallel.context import (
    Placement,
    _backward_pairs,
    _forward_pairs,
    _Gathered,
    _Ring,
    _swap,
    blockwise_attention,
)

B, H, C, WIDTH = 2, 4, 8, 16
DTYPES = [torch.float64, torch.float32]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def qkv(dtype: torch.dtype, heads: int = H, length: int = C) -> list[Tensor]:
    return [
        random(B, n, length, WIDTH, dtype=dtype, seed=seed).requires_grad_() for seed, n in enumerate((H, heads, heads))
    ]


def masked(dtype: torch.dtype, lonely: bool) -> Tensor:
    """A bias that hides some keys; with `lonely`, every key of queries 2 and 5."""
    hidden = random(B, 1, C, C, dtype=torch.float64, seed=7) > 0.5
    hidden[..., 0] = False
    if lonely:
        hidden[:, :, [2, 5]] = True
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)


def close(got: Tensor, want: Tensor, scale: float = 0.0) -> None:
    """Scores of up to 4 shift an exponent by 4 roundings each; forward and backward sum over the width and the keys."""
    tolerances.assert_close(got, want, terms=4 * (WIDTH + 4 * C), roundings=4 * 16, scale=scale)


def before_cancelling(cotangent: Tensor, v: Tensor, other: Tensor) -> float:
    """The size of the terms whose difference is the gradient of a query or key. With a single visible key the gradient
    is zero, and only the rounding of these terms is left.
    """
    change = torch.einsum("bqhd,bkhd->bhqk", cotangent, v.repeat_interleave(H // v.shape[2], 2)).detach()
    return float(change.abs().max() * other.detach().abs().max()) / WIDTH**0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["whole", "causal", "bias"])
def test_a_block_is_plain_attention(kind: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    bias, causal = masked(dtype, lonely=False) if kind == "bias" else None, kind == "causal"
    want, want_lse = block_reference(q, k, v, bias, causal)
    with torch.no_grad():
        out, lse = block(q, k, v, bias, causal)
    close(out, want)
    close(lse, want_lse)
    cotangent = random(*out.shape, dtype=dtype, seed=9)
    got = block_backward(cotangent, q.detach(), k.detach(), v.detach(), bias, out=out, lse=lse, causal=causal)
    for grad, wanted in zip(got, torch.autograd.grad(want, (q, k, v), cotangent), strict=True):
        close(grad, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_takes_fewer_key_heads(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype, heads=2)
    want, want_lse = block_reference(q, *(x.repeat_interleave(2, 1) for x in (k, v)), None, True)
    with torch.no_grad():
        out, lse = block(q, k, v, None, True)
    close(out, want)
    close(lse, want_lse)
    cotangent = random(*out.shape, dtype=dtype, seed=9)
    got = block_backward(cotangent, q.detach(), k.detach(), v.detach(), None, out=out, lse=lse, causal=True)
    for grad, wanted in zip(got, torch.autograd.grad(want, (q, k, v), cotangent), strict=True):
        close(grad, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [WIDTH - 5, WIDTH + 8])
@pytest.mark.parametrize("kind", ["whole", "causal", "bias"])
def test_a_block_takes_values_of_another_width(kind: str, width: int, dtype: torch.dtype) -> None:
    (q, k, _), v = qkv(dtype), random(B, H, C, width, dtype=dtype, seed=5).requires_grad_()
    bias, causal = masked(dtype, lonely=False) if kind == "bias" else None, kind == "causal"
    want, want_lse = block_reference(q, k, v, bias, causal)
    with torch.no_grad():
        out, lse = block(q, k, v, bias, causal)
    close(out, want)
    close(lse, want_lse)
    cotangent = random(*out.shape, dtype=dtype, seed=9)
    got = block_backward(cotangent, q.detach(), k.detach(), v.detach(), bias, out=out, lse=lse, causal=causal)
    for grad, wanted in zip(got, torch.autograd.grad(want, (q, k, v), cotangent), strict=True):
        close(grad, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_without_a_key_weighs_nothing(dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in qkv(dtype))
    bias = masked(dtype, lonely=True)
    (out, lse), (want, want_lse) = block(q, k, v, bias, False), block_reference(q, k, v, bias, False)
    assert (lse[:, :, [2, 5]] == -torch.inf).all() and out.isfinite().all()
    close(lse, want_lse)
    seen = [i for i in range(C) if i not in (2, 5)]
    close(out[:, :, seen], want[:, :, seen])


def whole(q: Tensor, k: Tensor, v: Tensor, query: list[int], document: Tensor | None) -> Tensor:
    """Attention of these chunks' queries to every key before them, as one plain softmax."""
    position = torch.cat([torch.arange(chunk * C, (chunk + 1) * C) for chunk in query])
    allowed = (position.unsqueeze(1) >= torch.arange(k.shape[2])).expand(B, -1, -1)
    if document is not None:
        allowed = allowed & (document[:, position].unsqueeze(2) == document.unsqueeze(1))
    bias = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, -torch.inf).unsqueeze(1)
    return block_reference(q, k, v, bias, False)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("mine, arrivals", [([1], [[0], [1]]), ([0, 3], [[0, 3], [1, 2]]), ([1, 2], [[3, 0], [2, 1]])])
def test_blocks_merge_to_the_whole(
    mine: list[int], arrivals: list[list[int]], documents: bool, dtype: torch.dtype
) -> None:
    """In the order of a ring's hops. A document starts at 13 of 32, so later queries see nothing of the first chunk."""
    chunks = sum(map(len, arrivals))
    q = random(B, H, len(mine) * C, WIDTH, dtype=dtype, seed=0).requires_grad_()
    k, v = (random(B, H, chunks * C, WIDTH, dtype=dtype, seed=s).requires_grad_() for s in (1, 2))
    document = None
    if documents:
        document = torch.stack([(torch.arange(chunks * C) >= start).long() for start in (13, C)])
    want = whole(q, k, v, mine, document)

    def of(x: Tensor, held: list[int]) -> Tensor:
        return torch.cat([x.detach()[:, :, c * C : (c + 1) * C] for c in held], 2)

    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=dtype)
    mask = mask_of(document)
    for held in arrivals:
        _forward_pairs(q.detach(), of(k, held), of(v, held), mask.pairs(C, chunks, mine, held), mask, out=out, lse=lse)
    close(out, want)

    cotangent = random(*out.shape, dtype=dtype, seed=9)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for held in arrivals:
        part_k, part_v = (torch.zeros(B, H, len(held) * C, WIDTH, dtype=dtype) for _ in range(2))
        pairs = mask.pairs(C, chunks, mine, held)
        _backward_pairs(
            cotangent,
            q.detach(),
            of(k, held),
            of(v, held),
            pairs,
            mask=mask,
            out=out,
            lse=lse,
            sums=(dq, part_k, part_v),
        )
        for place, chunk in enumerate(held):
            here, there = slice(place * C, (place + 1) * C), slice(chunk * C, (chunk + 1) * C)
            dk[:, :, there] += part_k[:, :, here]
            dv[:, :, there] += part_v[:, :, here]
    for grad, wanted in zip((dq, dk, dv), torch.autograd.grad(want, (q, k, v), cotangent), strict=True):
        close(grad, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_by_chunks_is_the_plain_one(sinks: bool, window: int, documents: bool, dtype: torch.dtype) -> None:
    """Outputs and gradients, including those of sinks from negligible to dominant; four query heads, two key heads."""
    length = 24
    q = random(B, length, H, WIDTH, dtype=dtype, seed=0).requires_grad_()
    k, v = (random(B, length, 2, WIDTH, dtype=dtype, seed=s).requires_grad_() for s in (1, 2))
    inputs, sinks_H = [q, k, v], None
    if sinks:
        sinks_H = torch.tensor([-1e4, 0.0, 2.5, 60.0], dtype=dtype, requires_grad=True)
        inputs.append(sinks_H)
    document = torch.stack([torch.arange(length) // n for n in (5, 11)]) if documents else None
    want, got = (
        attend(q, k, v, mask_of(document, window), sinks_H) for attend in (causal_attention, blockwise_attention)
    )
    close(got, want)
    cotangent = random(*want.shape, dtype=dtype, seed=9)
    grads = zip(*(torch.autograd.grad(out, inputs, cotangent) for out in (got, want)), strict=True)
    scales = [before_cancelling(cotangent, v, other) for other in (k, q)]
    for (grad, wanted), scale in zip_longest(grads, scales, fillvalue=0.0):
        assert grad.isfinite().all()
        close(grad, wanted, scale)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_branches_are_attended_to_alike_by_all(with_sinks: bool, window: int) -> None:
    """Blocked and by chunks, against plain operations."""
    mask, length, dtype = tree_mask(window), 26, torch.float64
    q, k, v = (random(1, length, n, WIDTH, dtype=dtype, seed=n + s).requires_grad_() for s, n in enumerate((H, 2, 2)))
    inputs = [q, k, v]
    sinks = torch.tensor([-1e4, 0.0, 2.5, 60.0], dtype=dtype, requires_grad=True) if with_sinks else None
    inputs += [sinks] * with_sinks
    q_first, k_first, v_first = (x.transpose(1, 2) for x in (q, k, v))
    want = plain_attention(q_first, k_first, v_first, mask, sinks).transpose(1, 2)
    cotangent = random(*want.shape, dtype=dtype, seed=9)
    wanted = torch.autograd.grad(want, inputs, cotangent, retain_graph=True)
    for attend in (causal_attention, blockwise_attention):
        out = attend(q, k, v, mask, sinks)
        close(out, want)
        for grad, other in zip(torch.autograd.grad(out, inputs, cotangent), wanted, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-11, atol=1e-12)


def test_a_sink_is_a_share_that_goes_nowhere() -> None:
    q, k, v = (random(1, 5, 2, WIDTH, dtype=torch.float64, seed=s) for s in range(3))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5
    lse = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf).logsumexp(-1)
    sinks = torch.tensor([0.3, -2.0], dtype=torch.float64)
    kept = lse.exp() / (lse.exp() + sinks.exp().unsqueeze(1))
    blockwise_attention(q, k, v, Mask(), None, lambda told: close(told, lse))
    close(blockwise_attention(q, k, v, Mask(), sinks), causal_attention(q, k, v) * kept.transpose(1, 2).unsqueeze(-1))


@given(st.integers(1, 6), st.booleans(), st.integers(1, 3))
def test_placements_cut_and_restore(size: int, zigzag: bool, chunk: int) -> None:
    placement = Placement(size, zigzag)
    assert sorted(placement.order()) == list(range(placement.chunks))
    x_BL = torch.arange(2 * placement.chunks * chunk).view(2, -1)
    parts = [placement.rank_slice(x_BL, rank) for rank in range(size)]
    assert {part.shape for part in parts} == {(2, x_BL.shape[1] // size)}
    together = torch.cat(parts, 1)
    assert torch.equal(placement.to_sequence_order(together), x_BL)
    assert torch.equal(placement.to_rank_order(x_BL), together)


@given(st.integers(2, 6), st.integers(1, 3))
def test_zigzag_is_even_work(size: int, chunk: int) -> None:
    """The pairs of positions under the causal mask, equally many on every rank."""
    placement = Placement(size, zigzag=True)
    position = torch.arange(placement.chunks * chunk).unsqueeze(0)
    pairs = {int((placement.rank_slice(position, rank) + 1).sum()) for rank in range(size)}
    assert len(pairs) == 1


def added_up_on_the_ring() -> None:
    """Each block's gradient is in bfloat16, and so is the result: their sum is not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group, shape = Group(dist.group.WORLD.group_name, size, rank), (B, H, C, WIDTH)
    q, k, v, grad = ([random(*shape, dtype=torch.bfloat16, seed=size * s + r) for r in range(size)] for s in range(4))
    inputs = [x[rank].requires_grad_() for x in (q, k, v)]
    out = _Ring.apply(*inputs, None, Placement(size, zigzag=False), group, Mask(), None)
    grads = torch.autograd.grad(out, inputs, grad[rank])
    wide, others = ([torch.zeros(shape) for _ in range(3)] for _ in range(2))
    with torch.no_grad():
        for r in range(rank, size):
            out, lse = torch.zeros(shape), torch.full(shape[:3], -torch.inf)
            for chunk in reversed(range(r + 1)):
                _forward_pairs(q[r], k[chunk], v[chunk], Mask().pairs(C, size, [r], [chunk]), Mask(), out=out, lse=lse)
            for chunk in reversed(range(r + 1)) if r == rank else [rank]:
                dq, (dk, dv) = (wide if r == rank else others)[0], (wide if chunk == rank else others)[1:]
                pairs, final = Mask().pairs(C, size, [r], [chunk]), out.bfloat16()
                _backward_pairs(
                    grad[r], q[r], k[chunk], v[chunk], pairs, mask=Mask(), out=final, lse=lse, sums=(dq, dk, dv)
                )
    for got, want in zip(grads, wide, strict=True):
        assert torch.equal(got, want.bfloat16())


def test_the_ring_adds_up_gradients_in_float32() -> None:
    world.run(4, added_up_on_the_ring)


def test_gradients_of_all_keys_are_added_up_in_float32() -> None:
    """Of a rank with the first and the last of four chunks."""
    placement, pairs = Placement(2, zigzag=True), Mask().pairs(C, 4, [0, 3], range(4))
    q, k, v, grad = (random(B, H, n * C, WIDTH, dtype=torch.bfloat16, seed=n) for n in (2, 4, 4, 2))
    sinks = torch.arange(H, dtype=torch.bfloat16)
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
    grads = torch.autograd.grad(_Gathered.apply(*inputs, placement, 0, Mask(), None), inputs, grad)
    wide, out = [torch.zeros(x.shape) for x in (q, k, v)], torch.zeros(q.shape)
    lse = sinks.detach().float().view(-1, 1).expand(q.shape[:3]).clone()
    with torch.no_grad():
        _forward_pairs(q, k, v, pairs, Mask(), out=out, lse=lse)
        out = out.bfloat16()
        _backward_pairs(grad, q, k, v, pairs, mask=Mask(), out=out, lse=lse, sums=wide)
        share = (sinks.float().view(-1, 1) - lse).exp()
        wide.append(-(share * (grad.float() * out.float()).sum(-1)).sum((0, 2)))
    for got, want in zip(grads, wide, strict=True):
        assert torch.equal(got, want.bfloat16())


def swapped() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(dist.group.WORLD.group_name, size, rank)
    whole_BSHh = random(B, 6, 4, 3, dtype=torch.float64, seed=0)
    x = whole_BSHh.chunk(size, 1)[rank].clone().requires_grad_()
    heads = _swap(x, 2, 1, group)
    assert torch.equal(heads, whole_BSHh.chunk(size, 2)[rank])
    assert torch.equal(_swap(heads, 1, 2, group), x)
    cotangent = random(*heads.shape, dtype=torch.float64, seed=rank + 1)
    (grad,) = torch.autograd.grad(heads, x, cotangent)
    assert torch.equal(grad, _swap(cotangent, 1, 2, group))


def test_swap_is_undone_by_the_swap_of_exchanged_dims() -> None:
    world.run(2, swapped)
