"""The mask of adapters' dropout: its statistics, and what it depends on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titanmoe.models.lora_dropout import INDEX_COLUMNS, InputDropout, take_indices, to_digits

T, D, RATE = 2000, 64, 0.1


def mask(name: str = "layers.0.attention.wq.weight", step: int = 1, seed: int = 0, first: int = 0) -> Tensor:
    """Which elements of the tokens from `first` on are kept."""
    dropout = InputDropout(name, D, RATE, seed)
    dropout.begin_step(step)
    return dropout(torch.ones(T, D), torch.arange(first, first + T), 0) != 0


def test_it_drops_the_given_fraction_of_tokens_and_of_elements() -> None:
    kept = mask().double()
    deviation = (RATE * (1 - RATE)) ** 0.5
    assert kept.mean() == pytest.approx(1 - RATE, abs=4 * deviation / (T * D) ** 0.5)
    for dim, count in ((0, T), (1, D)):
        assert (kept.mean(dim) - (1 - RATE)).abs().max() < 5 * deviation / count**0.5
    one, next_ = kept[:, :-1].flatten() - 1 + RATE, kept[:, 1:].flatten() - 1 + RATE
    assert abs((one * next_).mean()) < 4 * deviation**2 / (T * D) ** 0.5


def test_every_matrix_step_and_seed_has_a_mask_of_its_own() -> None:
    masks = [mask(), mask(name="layers.0.attention.wk.weight"), mask(step=2), mask(seed=1), mask(first=T)]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert (one != other).double().mean() == pytest.approx(2 * RATE * (1 - RATE), abs=0.01)


def test_a_shard_is_dropped_like_that_part_of_the_full_input() -> None:
    dropout, index = InputDropout("w", D, RATE, 0), torch.arange(T)
    dropout.begin_step(3)
    x = torch.randn(T, D, dtype=torch.float64)
    full = dropout(x, index, 3)
    for ranks in (4, 32):  # of 16 columns, and of 2, which is half of a random number
        shards = [dropout(shard, index, rank) for rank, shard in enumerate(x.chunk(ranks, 1))]
        assert torch.equal(torch.cat(shards, 1), full)
    torch.testing.assert_close(full[full != 0], (x / (1 - RATE))[full != 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_an_index_arrives_whole_in_every_dtype(dtype: torch.dtype) -> None:
    index_T = torch.tensor([0, 1, 255, 256, 257, 2**31 + 12345, 2**40 - 1])
    x_TD = torch.randn(len(index_T), 5).to(dtype)
    sent = torch.cat((x_TD, to_digits(index_T).to(dtype)), 1)
    x, index = take_indices(sent, 5)
    assert sent.shape[1] == 5 + INDEX_COLUMNS and torch.equal(x, x_TD) and torch.equal(index, index_T)
    assert take_indices(x_TD, 5)[1] is None
