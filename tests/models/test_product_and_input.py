"""Products of one input, of which backward adds up the input's gradients, against plain ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support import tolerances
from titanmoe.models.layers import product_and_input
from titanmoe.moe.router_product import product_by_terms

router_product = partial(product_by_terms, kernels="torch")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def chained(x: Tensor, weights: list[Tensor], bias: Tensor) -> list[Tensor]:
    first, x = product_and_input(x, weights[0], bias)
    second, x = product_and_input(x, weights[1])
    return [first, second, F.linear(x, weights[2])]


def plain(x: Tensor, weights: list[Tensor], bias: Tensor) -> list[Tensor]:
    return [F.linear(x, weights[0], bias), F.linear(x, weights[1]), F.linear(x, weights[2])]


@pytest.mark.parametrize("frozen", ["nothing", "input", "weight", "bias"])
def test_the_gradients_are_those_of_plain_products(frozen: str) -> None:
    x, weights, bias = random(2, 5, 8, seed=0), [random(n, 8, seed=n) for n in (6, 3, 4)], random(6, seed=9)
    leaf = {"input": x, "weight": weights[1], "bias": bias}.get(frozen)
    if leaf is not None:
        leaf.requires_grad_(False)
    leaves = [one for one in (x, *weights, bias) if one is not leaf]
    cotangents = [random(2, 5, n, seed=10 + n).detach() for n in (6, 3, 4)]
    results = [
        [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]
        for outputs in (chained(x, weights, bias), plain(x, weights, bias))
    ]
    for got, want in zip(*results, strict=True):
        tolerances.assert_close(got, want, terms=18)


@pytest.mark.parametrize("used", ["product", "input"])
def test_one_of_the_two_is_enough(used: str) -> None:
    x, w = random(3, 8, seed=0), random(6, 8, seed=1)
    y, x_after = product_and_input(x, w)
    one, same = (y, F.linear(x, w)) if used == "product" else (x_after, x * 1)
    got, want = (torch.autograd.grad(out.square().sum(), x)[0] for out in (one, same))
    tolerances.assert_close(got, want, terms=14)


@pytest.mark.parametrize("product", [product_and_input, router_product], ids=["product and input", "router's by parts"])
def test_a_split_backward_computes_what_it_asks_for(product: Callable[..., Any]) -> None:
    """As pipeline schedules do that take the gradients of inputs first, and those of weights later."""
    leaf, w = random(5, 8, seed=0).float(), random(6, 8, seed=1).float().detach().requires_grad_()
    x = leaf.bfloat16() if product is router_product else leaf * 1
    outputs = product(x, w)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    flops = []
    for wanted in ([leaf], [w], [leaf, w]):
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs], retain_graph=True)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] == flops[2] / 2 > 0
