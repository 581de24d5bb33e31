"""The router's product by bfloat16 parts, in plain form on CPUs, against the exact product and within its bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moe.test_router import router, tokens
from titanmoe.moe import router_product
from titanmoe.moe.router_product import plain_bfloat16_terms, product_by_terms
from titanmoe.ops.device import Hardware, imitate


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def within(got: Tensor, a: Tensor, b: Tensor, also: float = 0.0, rounded: float = 0.0) -> None:
    """a @ b, whose sums may err by (terms + 2) 2^-23 of the sum of sizes; `also` more of that, and of the result."""
    a, b = a.double(), b.double()
    sizes, exact = a.abs() @ b.abs(), a @ b
    bound = ((a.shape[1] + 2) * 2**-23 + also) * sizes + rounded * exact.abs()
    assert ((got.double() - exact).abs() <= bound).all()


def test_parts_add_up_exactly_and_lie_in_either_order() -> None:
    x_RC = random(50, 7, seed=0) * 2.0 ** torch.arange(-60, -11 + 1).view(-1, 1)
    parts = plain_bfloat16_terms(x_RC, False)
    assert parts.dtype == torch.bfloat16 and torch.equal(parts.flip(1), plain_bfloat16_terms(x_RC, True))
    assert torch.equal(parts[:, 0], parts[:, 1]) and torch.equal(parts[:, 1:].double().sum(1), x_RC.double())


@pytest.mark.parametrize(("rows", "experts", "dim"), [(300, 5, 8), (3, 64, 40), (0, 4, 8)])
def test_product_and_gradients_are_within_their_bounds(rows: int, experts: int, dim: int) -> None:
    """Few terms, so that a missing part would be seen."""
    x_TD = random(rows, dim, seed=1).bfloat16().requires_grad_()
    w_ED, grad_TE = random(experts, dim, seed=2).requires_grad_(), random(rows, experts, seed=3)
    logits_TE = product_by_terms(x_TD, w_ED, "torch")
    dx_TD, dw_ED = torch.autograd.grad(logits_TE, (x_TD, w_ED), grad_TE)
    assert (logits_TE.dtype, dx_TD.dtype, dw_ED.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    within(logits_TE, x_TD, w_ED.t())
    within(dw_ED, grad_TE.t(), x_TD)
    within(dx_TD, grad_TE, w_ED, also=2**-14, rounded=2**-8)


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_only_the_gradient_that_is_wanted(frozen: str) -> None:
    x_TD = random(6, 8, seed=1).bfloat16().requires_grad_(frozen != "input")
    w_ED = random(4, 8, seed=2).requires_grad_(frozen != "weight")
    product_by_terms(x_TD, w_ED, "torch").sum().backward()
    assert (x_TD.grad is None, w_ED.grad is None) == (frozen == "input", frozen == "weight")


@pytest.mark.parametrize(
    ("options", "dtype", "by_parts"),
    [
        ({}, torch.bfloat16, True),
        ({"router_bias": True}, torch.bfloat16, True),
        ({"router_product": "float32"}, torch.bfloat16, False),
        ({"router_dtype": "float64"}, torch.bfloat16, False),
        ({"jitter": 0.1}, torch.bfloat16, False),  # then the input is not exact in bfloat16
        ({}, torch.float32, False),
    ],
)
def test_the_router_takes_it_on_gpus(
    options: dict[str, Any], dtype: torch.dtype, by_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def product(a: Tensor, b: Tensor) -> Tensor:
        calls.append(a.dtype)
        return a.float() @ b.float()

    monkeypatch.setattr(router_product, "_product_on_gpu", product)
    made = router(16, torch.float32, kernels="torch", **options)
    if made.bias is not None:
        torch.nn.init.normal_(made.bias, generator=torch.Generator().manual_seed(4))
    x_TD = random(6, 16, seed=1).to(dtype)
    wide_TE = made(x_TD, tokens(6))[0]
    assert not calls, "on CPUs the product is float32"
    with imitate(Hardware("cuda", (9, 0))):
        logits_TE = made(x_TD, tokens(6))[0]
    assert calls == [torch.bfloat16] * by_parts
    torch.testing.assert_close(logits_TE, wide_TE, rtol=1e-5, atol=1e-5)
