"""The one description of who sees whom, against its definition; and that blocks without a pair are left out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.masks import dense_mask, mask_of, tree_mask
from titanmoe import mask as room
from titanmoe.mask import BLOCK, CAUSAL, Mask, ends, spans
from titanmoe.parallel.context import Placement


@st.composite
def masks(draw: st.DrawFn, length: int) -> Mask:
    """Causality alone, or random trees of two samples: a node begins at each of a few places, and ends where the one
    that it hangs on does, or before."""
    window = draw(st.sampled_from([0, 1, 3, 8]))
    if draw(st.booleans()):
        return mask_of(None, window)
    until, depth = torch.full((2, length), length), torch.arange(length).repeat(2, 1)
    for row in range(2):
        for begin in sorted(draw(st.lists(st.integers(1, length - 1), max_size=4, unique=True))):
            end = draw(st.integers(begin + 1, int(until[row, begin])))
            root = draw(st.integers(0, begin - 1))
            until[row, begin:end] = end
            depth[row, begin:] = int(depth[row, root]) + 1 + torch.arange(length - begin)
    return spans(until, depth)._replace(window=window)


def pairs_of(mask: Mask, placement: Placement, chunk: int, rank: int) -> list[room.BlockPair]:
    chunks = placement.chunks_of(rank)
    return mask.pairs(chunk, placement.chunks, chunks, range(placement.chunks))


@given(st.integers(1, 3), st.sampled_from([1, 4, 5]), st.sampled_from([2, 3, 256]), st.data())
def test_every_visible_pair_is_computed_once_and_no_run_is_hidden(size: int, chunk: int, block: int, data) -> None:
    """Whatever the ranks: queries of all of them together are those of the sequence."""
    placement, before = Placement(size, zigzag=True), room.BLOCK
    length = placement.chunks * chunk
    mask = data.draw(masks(length)) if length > 1 else mask_of(None, 1)
    samples = 1 if mask.until_BL is None else 2
    seen = torch.zeros(samples, length, length)
    room.BLOCK = block
    room._pairs.cache_clear()
    try:
        for rank in range(size):
            where = placement.rank_slice(torch.arange(length).unsqueeze(0), rank)[0]
            for pair in pairs_of(mask, placement, chunk, rank):
                assert torch.equal(where[pair.rows], torch.arange(pair.queries.start, pair.queries.stop))
                shape = (pair.queries.stop - pair.queries.start, pair.keys.stop - pair.keys.start)
                like = torch.zeros(samples, 1)
                bias = mask.bias(pair, like)
                allowed = torch.ones(1, 1, *shape) if bias is None else (bias == 0).float()
                if pair.causal:
                    assert pair.queries == pair.keys and bias is None
                    allowed = allowed.tril()
                if pair.queries.start > pair.keys.start or not pair.causal:
                    assert allowed.amax((0, 1, 2)).all(), "a key that no query sees"
                assert bias is None or not allowed.all(), "a mask that hides nothing"
                seen[pair.samples, pair.queries, pair.keys] += allowed[:, 0]
    finally:
        room.BLOCK = before
        room._pairs.cache_clear()
    assert torch.equal(seen, dense_mask(mask, length).float().expand_as(seen))


def test_documents_end_where_the_next_begins() -> None:
    assert ends(torch.tensor([[4, 4, 0, 0, 0, -1], [1, 2, 2, 2, 3, 3]])).tolist() == [
        [2, 2, 5, 5, 5, 6],
        [1, 4, 4, 4, 6, 6],
    ]


def test_branches_see_what_they_go_on_from_and_not_each_other() -> None:
    seen = dense_mask(tree_mask(), 26)[0]
    assert seen[20].nonzero().flatten().tolist() == [*range(6), *range(11, 21)]
    assert seen[23].nonzero().flatten().tolist() == [*range(6), *range(11, 18), 21, 22, 23]
    assert dense_mask(tree_mask(window=4), 26)[0][21].nonzero().flatten().tolist() == [15, 16, 17, 21]
    assert seen[25].nonzero().flatten().tolist() == [24, 25]


@pytest.mark.parametrize("window", [0, 1, 4])
def test_pairs_are_counted(window: int) -> None:
    documents = mask_of(torch.tensor([[0] * 5 + [1] * 3, [0] * 8]), window)
    assert documents.count(8) == dense_mask(documents, 8).sum()
    assert tree_mask(window).count(26) == dense_mask(tree_mask(window), 26).sum()
    assert mask_of(None, window).count(8, samples=2) == 2 * dense_mask(mask_of(None, window), 8).sum()


def test_causality_alone_takes_whole_chunks() -> None:
    (first, second, third) = CAUSAL.pairs(4 * BLOCK, 2, [0, 1], [0, 1])
    assert (first.causal, second.causal, third.causal) == (True, False, True)
    assert second.keys == slice(0, 4 * BLOCK)
    assert second.rows == second.queries == slice(4 * BLOCK, 8 * BLOCK)


def test_a_narrow_window_leaves_out_most_pairs() -> None:
    pairs = mask_of(None, 128).pairs(16 * BLOCK, 1, [0], [0])
    assert [(pair.keys.start, pair.keys.stop) for pair in pairs] == [
        (max(0, n * BLOCK - 127), (n + 1) * BLOCK) for n in range(16)
    ]


def test_a_rank_has_nothing_to_do_with_the_keys_of_another_document() -> None:
    """Each of four ranks has a document of its own: in a ring nothing but the first step computes."""
    mask = mask_of(torch.arange(16).unsqueeze(0) // 4)
    for rank in range(4):
        assert [bool(mask.pairs(4, 4, [rank], [other])) for other in range(4)] == [other == rank for other in range(4)]
