"""Blocked attention against plain operations, with all scores at once."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support import tolerances
from tests.support.live_bytes import Live
from tests.support.masks import mask_of
from titanmoe.ops.cpu import blocked_attention as blocked
from titanmoe.ops.cpu.blocked_attention import QUERIES, blocked_attention


def plain(q_BHSh, k_BGSh, v_BGSv, document_BS):
    k, v = (x.repeat_interleave(q_BHSh.shape[1] // x.shape[1], 1) for x in (k_BGSh, v_BGSv))
    S = q_BHSh.shape[2]
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    if document_BS is not None:
        seen = seen & (document_BS[:, :, None] == document_BS[:, None, :])[:, None]
    scores = (q_BHSh @ k.transpose(-1, -2) / math.sqrt(q_BHSh.shape[-1])).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def both(dtype, S, heads, key_heads, width, value_width, documents, size=1.0):
    make = torch.Generator().manual_seed(0)

    def draw(heads: int, width: int) -> torch.Tensor:
        # In the projections' layout: positions before heads.
        x = torch.randn(2, S, heads, width, generator=make, dtype=torch.float64) * size
        return x.to(dtype).transpose(1, 2)

    leaves = draw(heads, width), draw(key_heads, width), draw(key_heads, value_width)
    document = torch.randint(3, (2, S), generator=make).sort(1).values if documents else None
    weight = torch.randn(2, heads, S, value_width, generator=make, dtype=torch.float64)
    results = []
    for attend, wide in (blocked_attention, dtype), (plain, torch.float64):
        q, k, v = (x.detach().to(wide).requires_grad_() for x in leaves)
        out = attend(q, k, v, mask_of(document) if attend is blocked_attention else document)
        results.append((out, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    return zip(*results, strict=True)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("S", [1, 7, QUERIES, QUERIES + 1, 3 * QUERIES - 5])
@pytest.mark.parametrize(("heads", "key_heads", "width", "value_width"), [(4, 4, 12, 8), (6, 2, 8, 8), (4, 1, 8, 16)])
def test_equals_plain_attention_and_its_gradients(S, heads, key_heads, width, value_width, documents):
    for got, want in both(torch.float64, S, heads, key_heads, width, value_width, documents):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("together", [1, 2, 3, 5])
def test_heads_and_samples_in_groups(monkeypatch, together):
    """3 key heads of 2 samples: one at a time, in uneven groups, a sample at a time."""
    monkeypatch.setattr(blocked, "SCORES", together * 2 * 7 * 7)
    for got, want in both(torch.float64, 7, 6, 3, 8, 8, False):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max().item())


RAGGED = [[400]], [[1] * 400], [[130, 1, 200, 69], [300, 100]], [[128, 128, 144], [127, 273]]


@pytest.mark.parametrize("lengths", RAGGED, ids=["one", "each", "long and short", "at a border"])
def test_documents_of_any_length(lengths):
    document = torch.stack([torch.arange(len(its)).repeat_interleave(torch.tensor(its)) for its in lengths])
    make = torch.Generator().manual_seed(1)
    q, k, v, weight = (torch.randn(len(lengths), 2, 400, 4, generator=make, dtype=torch.float64) for _ in range(4))
    leaves, results = [x.requires_grad_() for x in (q, k, v)], []
    for attend in (blocked_attention, plain):
        out = attend(*leaves, mask_of(document) if attend is blocked_attention else document)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max().item())


def test_work_is_that_of_the_documents():
    """As data.balance_work counts it, to a block: 16 documents of one block each against a single document."""
    cost = []
    for length in (16 * QUERIES, QUERIES):
        document = (torch.arange(16 * QUERIES) // length).unsqueeze(0)
        x = [torch.randn(1, 2, 16 * QUERIES, 8, requires_grad=True) for _ in range(3)]
        with FlopCounterMode(display=False) as counter:
            blocked_attention(*x, mask_of(document)).sum().backward()
        cost.append(counter.get_total_flops())
    pairs = 16 * 17 / 2
    assert cost[0] / cost[1] == pytest.approx(pairs / 16)


def test_huge_scores_do_not_overflow():
    for got, want in both(torch.float64, QUERIES + 9, 2, 2, 8, 8, True, size=60.0):
        assert (got - want).abs().max() <= 1e-9 * want.abs().max()


def test_bfloat16_is_as_near_as_its_rounding():
    for got, want in both(torch.bfloat16, 2 * QUERIES, 4, 2, 64, 64, False):
        assert got.dtype == torch.bfloat16
        # Scores, weights, sums; and the same number again for gradients.
        assert (got.double() - want).norm() <= tolerances.bound(torch.bfloat16, roundings=6) / 2 * want.norm()


def test_memory_of_a_long_sequence_does_not_grow_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "QUERIES", 16)
    monkeypatch.setattr(blocked, "SCORES", 1 << 12)
    peaks = []
    for S in 512, 1024:
        q, k, v = (torch.randn(1, heads, S, 4, requires_grad=True) for heads in (4, 2, 2))
        with Live() as live:
            blocked_attention(q, k, v, mask_of(None)).sum().backward()
        peaks.append(live.peak)
    assert peaks[1] < 2.1 * peaks[0]
