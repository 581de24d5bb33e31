"""Tokens to rows and back: against plain indexing, and each as the other's transpose, with and without gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from titanmoe.moe.permute import invert, permute_tokens, reorder, unpermute_tokens

D = 3


class Layout(NamedTuple):
    source_S: Tensor
    slot_TJ: Tensor


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any token has any number of rows up to J, in any slots; some rows belong to no token."""
    tokens, width = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    used = draw(st.lists(st.booleans(), min_size=tokens * width, max_size=tokens * width))
    rows = sum(used) + draw(st.integers(0, 3))
    places = draw(st.permutations(range(rows)))
    source, slot = [tokens] * rows, [rows] * (tokens * width)
    for entry, row in zip((i for i, there in enumerate(used) if there), places, strict=False):
        source[row], slot[entry] = entry // width, row
    return Layout(torch.tensor(source, dtype=torch.int64), torch.tensor(slot, dtype=torch.int64).view(tokens, width))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_rows(x_TD: Tensor, layout: Layout) -> Tensor:
    out = torch.zeros(len(layout.source_S), x_TD.shape[1], dtype=x_TD.dtype)
    for row, token in enumerate(layout.source_S.tolist()):
        if token < len(x_TD):
            out[row] = x_TD[token]
    return out


def plain_tokens(y_SD: Tensor, layout: Layout) -> Tensor:
    out = torch.zeros(len(layout.slot_TJ), y_SD.shape[1], dtype=y_SD.dtype)
    for token, slots in enumerate(layout.slot_TJ.tolist()):
        for row in slots:
            if row < len(y_SD):
                out[token] += y_SD[row]
    return out


@given(layouts())
def test_both_maps_are_plain_indexing(layout: Layout) -> None:
    x_TD, y_SD = numbers(len(layout.slot_TJ), D), numbers(len(layout.source_S), D, seed=1)
    assert torch.equal(permute_tokens(x_TD, *layout), plain_rows(x_TD, layout))
    torch.testing.assert_close(unpermute_tokens(y_SD, *layout), plain_tokens(y_SD, layout), rtol=0, atol=1e-14)


@given(layouts())
def test_each_is_the_others_transpose(layout: Layout) -> None:
    x_TD, y_SD = numbers(len(layout.slot_TJ), D), numbers(len(layout.source_S), D, seed=1)
    here, there = (x_TD * unpermute_tokens(y_SD, *layout)).sum(), (permute_tokens(x_TD, *layout) * y_SD).sum()
    assert float(here) == pytest.approx(float(there), abs=1e-12)


@given(layouts())
def test_gradients_are_those_of_plain_indexing(layout: Layout) -> None:
    x_TD = numbers(len(layout.slot_TJ), D).requires_grad_()
    y_SD = numbers(len(layout.source_S), D, seed=1).requires_grad_()
    for ours, plain, argument, result in (
        (permute_tokens, plain_rows, x_TD, y_SD),
        (unpermute_tokens, plain_tokens, y_SD, x_TD),
    ):
        (got,) = torch.autograd.grad(ours(argument, *layout), argument, result.detach())
        with torch.enable_grad():
            through_loop = plain(argument, layout)
        want = torch.zeros_like(argument)
        if through_loop.requires_grad:
            (want,) = torch.autograd.grad(through_loop, argument, result.detach())
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@given(st.integers(0, 9).flatmap(lambda n: st.permutations(range(n))))
def test_reorder_and_its_inverse(order: list[int]) -> None:
    order_R = torch.tensor(order, dtype=torch.int64)
    inverse_R = invert(order_R)
    assert torch.equal(inverse_R[order_R], torch.arange(len(order)))
    assert torch.equal(order_R[inverse_R], torch.arange(len(order)))
    x_RD = numbers(len(order), D).requires_grad_()
    moved = reorder(x_RD, order_R, inverse_R)
    assert torch.equal(moved, x_RD[order_R])
    assert torch.equal(reorder(moved, inverse_R, order_R), x_RD)
    cotangent = numbers(len(order), D, seed=1)
    (got,) = torch.autograd.grad(moved, x_RD, cotangent)
    (want,) = torch.autograd.grad(x_RD[order_R], x_RD, cotangent)
    assert torch.equal(got, want)


@pytest.mark.parametrize("tokens, rows", [(0, 0), (0, 2), (3, 0)])
def test_nothing_to_move_gives_zeros_and_zero_gradients(tokens: int, rows: int) -> None:
    layout = Layout(torch.full((rows,), tokens), torch.full((tokens, 2), rows))
    x_TD, y_RD = numbers(tokens, D).requires_grad_(), numbers(rows, D).requires_grad_()
    (permute_tokens(x_TD, *layout).sum() + unpermute_tokens(y_RD, *layout).sum()).backward()
    assert torch.equal(permute_tokens(x_TD, *layout), torch.zeros(rows, D, dtype=torch.float64))
    assert torch.equal(unpermute_tokens(y_RD, *layout), torch.zeros(tokens, D, dtype=torch.float64))
    assert torch.equal(x_TD.grad, torch.zeros_like(x_TD)) and torch.equal(y_RD.grad, torch.zeros_like(y_RD))
