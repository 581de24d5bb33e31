"""Chains block by block against the plain formulas next to their callers: values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.live_bytes import saved_bytes
from titanmoe.models.layers import RMSNorm, plain_norm, plain_rotate, rotate, swiglu
from titanmoe.moe.swiglu import plain_swiglu, plain_swiglu_backward
from titanmoe.ops.cpu import rowwise

ROWS = [0, 1, 7, 65]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "BLOCK_NUMBERS", 64)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3).to(dtype)


def near(one: Callable[..., Tensor], other: Callable[..., Tensor], *given: Tensor) -> None:
    results = []
    for function in (one, other):
        leaves = [x.detach().requires_grad_() for x in given]
        y = function(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, random(*y.shape, dtype=y.dtype, seed=9))])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", ROWS)
def test_norm(rows: int) -> None:
    def blocks(x: Tensor, weight: Tensor) -> Tensor:
        return rowwise.norm(x, weight, 1e-6)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return plain_norm(x, weight, 1e-6)

    near(blocks, plain, random(rows, 3, 8), random(8, seed=1))
    near(blocks, plain, random(rows, 12)[:, 2:10], random(8, seed=1))  # a part of wider rows


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_rotation(rows: int, samples: int) -> None:
    half = random(samples, rows, 1, 4, seed=1)
    angle = torch.cat((half, half), -1)
    rope = angle.cos(), angle.sin()
    near(lambda x: rotate(x, rope), lambda x: plain_rotate(x, rope), random(2, rows, 3, 8))
    near(lambda x: rotate(x, rope), lambda x: plain_rotate(x, rope), random(2, rows, 3, 12)[..., 4:])
    near(lambda x: rotate(x, rope), lambda x: plain_rotate(x, rope), random(2, rows, 3, 12)[..., :8])


@pytest.mark.parametrize("rows", ROWS)
def test_swiglu(rows: int) -> None:
    near(swiglu, lambda gate, up: F.silu(gate) * up, random(2, rows, 24), random(2, rows, 24, seed=1))
    made = random(rows, 24), random(rows, 24, seed=1), random(rows, 1, seed=2)
    torch.testing.assert_close(rowwise.swiglu(*made), plain_swiglu(*made, False), rtol=1e-12, atol=1e-12)
    grad = random(rows, 24, seed=3)
    pairs = zip(rowwise.swiglu_backward(grad, *made), plain_swiglu_backward(grad, *made, False), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_bfloat16_rounds_results_alone() -> None:
    gate, up, grad = (random(65, 24, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    weight = random(65, 1, dtype=torch.float32, seed=3)
    exact = plain_swiglu_backward(*(x.double() for x in (grad, gate, up, weight)), False)
    for got, want in zip(rowwise.swiglu_backward(grad, gate, up, weight), exact, strict=True):
        rounding = {torch.bfloat16: 2**-9, torch.float32: 1e-6}[got.dtype]
        assert (got - want).norm() <= rounding * want.norm()


def test_the_plain_norm_rounds_its_result_alone() -> None:
    x, weight = (random(*shape, dtype=torch.bfloat16) for shape in ((65, 24), (24,)))
    wide = plain_norm(x.float(), weight.float(), 1e-6)
    assert torch.equal(plain_norm(x, weight, 1e-6), wide.to(torch.bfloat16))


def test_inputs_alone_are_kept() -> None:
    x = random(64, 8, dtype=torch.bfloat16).requires_grad_()
    norm = RMSNorm(8, 1e-6, torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    _, kept = saved_bytes(lambda: norm(x))
    assert kept == (64 * 8 + 8) * 2 + 64 * 4  # with the scale of each row
