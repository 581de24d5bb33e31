"""flex_attention against plain attention: the forward pass, which is all it has on CPUs, and the blocks.

On GPUs the kernels visit the blocks that the mask lists; on CPUs plain operations check every pair. So the lists of
blocks are tested separately.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tests.support.masks import mask_of, tree_mask
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.mask import Mask
from titanmoe.models.attention import causal_attention
from titanmoe.parallel import flex as room
from titanmoe.parallel.context import Placement, blockwise_attention
from titanmoe.parallel.flex import MASK_BLOCK, Masks, block_mask, flex, flex_attention_over

B, H, G, WIDTH = 2, 4, 2, 16


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def visited(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """(B, blocks, blocks): blocks in which the kernel checks pairs, and blocks in which it takes all of them."""

    def dense(count_BHQ: Tensor, order_BHQN: Tensor) -> Tensor:
        taken = torch.arange(order_BHQN.shape[-1]) < count_BHQ.unsqueeze(-1)
        return torch.zeros_like(taken).scatter(-1, order_BHQN.long(), taken)[:, 0]

    return dense(mask.kv_num_blocks, mask.kv_indices), dense(mask.full_kv_num_blocks, mask.full_kv_indices)


@given(st.integers(1, 2), st.integers(1, 260), st.sampled_from([0, 1, 100, 129, 400]), st.integers(0, 3), st.data())
def test_no_pair_is_lost_or_let_in(size: int, chunk: int, window: int, documents: int, data: st.DataObject) -> None:
    """Documents in any numbering, chunks that cross the borders of blocks."""
    placement = Placement(size, zigzag=True)
    length = placement.chunks * chunk
    document = None
    if documents:
        starts = [data.draw(st.lists(st.integers(0, length - 1), max_size=documents)) for _ in range(B)]
        begins = torch.zeros(B, length, dtype=torch.long)
        for row, places in zip(begins, starts, strict=True):
            row[places] = data.draw(st.sampled_from([1, -1]))
        document = begins.cumsum(1)
    for rank in range(size):
        position = placement.rank_slice(torch.arange(length).unsqueeze(0), rank)[0]
        mask = block_mask(position, length, mask_of(document, window))
        apart = position.unsqueeze(1) - torch.arange(length)
        want = ((apart >= 0) & (apart < (window or length))).unsqueeze(0)
        if document is not None:
            want = want & (document[:, position].unsqueeze(2) == document.unsqueeze(1))
        b, q, k = torch.meshgrid(*(torch.arange(n) for n in want.shape), indexing="ij")
        assert torch.equal(mask.mask_mod(b, 0, q, k), want)
        asks, takes = visited(mask)
        assert not (asks & takes).any()
        padded = torch.nn.functional.pad(want, (0, -want.shape[2] % MASK_BLOCK, 0, -want.shape[1] % MASK_BLOCK))
        blocks = padded.unflatten(2, (-1, MASK_BLOCK)).unflatten(1, (-1, MASK_BLOCK))
        assert not (blocks.any((2, 4)) & ~(asks | takes)).any(), "a block with pairs is left out"
        assert not (takes & ~blocks.all(4).all(2)).any(), "a block is taken whole, and is not"
        if document is None and (size == 1 or not window):  # a window may lie in a gap of zigzag's positions
            assert not (asks & ~blocks.any((2, 4))).any()


def test_most_blocks_of_short_documents_are_left_out() -> None:
    """8 documents of 512 in 4096 positions: 4 blocks each, 10 of whose 16 pairs are causal, 6 of them whole."""
    asks, takes = visited(block_mask(torch.arange(4096), 4096, mask_of((torch.arange(4096) // 512).unsqueeze(0))))
    assert (int(asks.sum()), int(takes.sum())) == (8 * 4, 8 * 6)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [0, 3, 40])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_it_is_plain_attention(with_sinks: bool, window: int, documents: bool) -> None:
    length = 24
    q, k, v = (random(B, length, n, WIDTH, seed=s) for s, n in enumerate((H, G, G)))
    sinks = torch.tensor([-1e4, 0.0, 2.5, 60.0], dtype=torch.float64) if with_sinks else None
    document = torch.stack([torch.arange(length) // n for n in (5, 11)]) if documents else None
    masks, mask, lse = Masks(Placement(1, zigzag=False), 0), mask_of(document, window), []
    got = flex_attention_over(q, k, v, mask, sinks, lse.append, masks=masks, group=NO_GROUP)
    torch.testing.assert_close(got, causal_attention(q, k, v, mask, sinks), rtol=1e-12, atol=1e-12)
    blockwise_attention(q, k, v, mask, None, lse.append)
    torch.testing.assert_close(*lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [0, 4])
def test_branches_too(window: int) -> None:
    q, k, v = (random(1, 26, n, WIDTH, seed=s) for s, n in enumerate((H, G, G)))
    got = flex_attention_over(q, k, v, tree_mask(window), masks=Masks(Placement(1, zigzag=False), 0), group=NO_GROUP)
    torch.testing.assert_close(got, causal_attention(q, k, v, tree_mask(window)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zigzag", [True, False])
def test_the_queries_of_a_rank_see_what_they_would_alone(zigzag: bool) -> None:
    """What allgather does after gathering; values are narrower than keys, as in latent attention."""
    length, placement = 24, Placement(3, zigzag)
    q, k, v = (random(B, length, n, w, seed=s) for s, (n, w) in enumerate(((H, WIDTH), (H, WIDTH), (H, 10))))
    document = torch.stack([torch.arange(length) // n for n in (5, 11)])
    want = causal_attention(q, k, v, mask_of(document))
    for rank in range(3):
        mask = Masks(placement, rank)(length, mask_of(document), q.device)
        got = flex(placement.rank_slice(q, rank), k, v, mask, None)
        torch.testing.assert_close(got, placement.rank_slice(want, rank), rtol=1e-12, atol=1e-12)


def test_layers_share_a_mask_and_microbatches_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(room, "block_mask", lambda *given: made.append(given) or len(made))
    masks, cpu = Masks(Placement(1, zigzag=False), 0), torch.device("cpu")
    first, second = mask_of(torch.zeros(1, 8)), mask_of(torch.zeros(1, 8))
    for window in (0, 4, 0, 4):
        masks(8, first._replace(window=window), cpu)
    assert len(made) == 2
    assert masks(8, second, cpu) == 3 and masks(8, second, cpu) == 3
    assert masks(8, Mask(), cpu) == 4 and masks(8, Mask(), cpu) == 4
    first.until_BL.sub_(1)  # the same tensor, other documents
    assert masks(8, first._replace(window=4), cpu) == 5
