"""The experts' own backward against plain autograd: the same numbers from fewer saved bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

from tests.moe.test_experts import COUNTS, HIDDEN, STEPS, D, experts, random
from tests.support import tolerances
from tests.support.live_bytes import saved_bytes
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.expert_products import ExpertProducts, plain_swiglu
from titanmoe.moe.experts import Experts
from titanmoe.moe.grouped_mm import Groups, grouped_product, loop_product


def inputs(counts: list[int], dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Tensor]:
    rows = sum(counts)
    return [
        (random(rows, HIDDEN, dtype=dtype, seed=0) * 6).detach().requires_grad_(),
        (random(rows, HIDDEN, dtype=dtype, seed=1) * 6).detach().requires_grad_(),
        random(rows, 1, dtype=weight_dtype, seed=2),
        random(len(counts), D, HIDDEN, dtype=dtype, seed=3),
    ]


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("grouped, dtype", [(False, torch.float64), (True, torch.float32), (True, torch.bfloat16)])
def test_the_down_half_equals_plain_autograd(
    grouped: bool, dtype: torch.dtype, counts: list[int], clamped: bool
) -> None:
    """In bfloat16 ours is no farther from the truth, or within the rounding of the result."""
    results, weight_dtype = [], torch.promote_types(dtype, torch.float32)

    def plain(hidden: tuple[Tensor, ...], weight: Tensor, w2: Tensor) -> tuple[Tensor]:
        product = grouped_product if grouped and dtype == w2.dtype else loop_product
        return (product(plain_swiglu(*hidden, weight, clamped), w2, Groups(torch.tensor(counts))),)

    made = ExpertProducts(groups=Groups(torch.tensor(counts)), method="grouped" if grouped else "loop", clamped=clamped)
    for down, wide in ((made.down, dtype), (plain, dtype), (plain, torch.float64)):
        leaves = [x.detach().to(torch.promote_types(x.dtype, wide)) for x in inputs(counts, dtype, weight_dtype)]
        leaves = [x.requires_grad_() for x in leaves]
        # `down` looks at the autograd nodes of its inputs, so none may be a leaf.
        *hidden, weight, w2 = (x.view_as(x) for x in leaves)
        (y_RD,) = down(tuple(hidden), weight, w2)
        cotangent = random(*y_RD.shape, dtype=dtype, seed=4).detach().to(wide)
        results.append([y_RD.detach(), *torch.autograd.grad(y_RD, leaves, cotangent)])
    for got, plain, exact in zip(*results, strict=True):
        assert got.dtype == plain.dtype
        if dtype == torch.bfloat16:
            assert (got - exact).norm() <= max(1.05 * (plain - exact).norm(), 2**-8 * exact.norm())
        else:
            tolerances.assert_close(got, plain, terms=2 * HIDDEN, roundings=2 * STEPS)
    idle = torch.tensor(counts) == 0
    assert torch.equal(results[0][4][idle], torch.zeros_like(results[0][4][idle]))


def test_a_backward_pass_split_in_two_gives_each_half_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in zero-bubble schedules: inputs first, weights later from the recorded gradient of the node."""

    from titanmoe.moe import expert_products

    products = []
    loop, gradient = expert_products.loop_product, expert_products.loop_gradient
    monkeypatch.setitem(expert_products.PRODUCTS, "loop", lambda *x: products.append("input") or loop(*x))
    monkeypatch.setitem(expert_products.GRADIENTS, "loop", lambda *x: products.append("weight") or gradient(*x))
    counts = [5, 0, 9, 3]
    gate, up, weight, w2 = inputs(counts, torch.float64, torch.float64)
    hidden = gate.view_as(gate), up.view_as(up)
    made = ExpertProducts(groups=Groups(torch.tensor(counts)), method="loop")
    (y_RD,) = made.down(hidden, weight.view_as(weight), w2)
    cotangent = random(*y_RD.shape, dtype=torch.float64, seed=4).detach()
    want = torch.autograd.grad(y_RD, [gate, up, weight, w2], cotangent, retain_graph=True)
    assert products == ["input", "input", "weight"]  # forward; then both of a whole backward
    products.clear()
    got = torch.autograd.grad(y_RD, [gate, up, weight], cotangent, retain_graph=True)
    assert products == ["input"]
    edge = w2.view_as(w2).grad_fn.next_functions[0][0]
    got += torch.autograd.grad((GradientEdge(y_RD.grad_fn, 0),), (GradientEdge(edge, 0),), (cotangent,))
    assert products == ["input", "weight"]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("switches", [{}, {"expert_activation": "clamped_swiglu"}], ids=["swiglu", "clamped"])
def test_within_a_recomputed_block(switches: dict[str, Any]) -> None:
    made, counts = experts("loop", torch.float64, **switches), torch.tensor([5, 0, 9, 3])
    x_RD, weight_R1 = random(17, D, dtype=torch.float64, seed=5), random(17, 1, dtype=torch.float64, seed=6)
    leaves = [x_RD, weight_R1, *made.parameters()]
    want = torch.autograd.grad(made.products(x_RD, weight_R1, counts).square().sum(), leaves)
    again = checkpoint(made.products, x_RD, weight_R1, counts, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.square().sum(), leaves), want, strict=True):
        assert torch.equal(a, b)


def weighted_after(made: Experts, x_RD: Tensor, weight_R1: Tensor, count_e: Tensor) -> Tensor:
    """As usually written: the routing weight multiplies the experts' outputs, and autograd saves what it needs."""
    groups = Groups(count_e)
    hidden = F.silu(loop_product(x_RD, made.w1, groups)) * loop_product(x_RD, made.w3, groups)
    return (loop_product(hidden, made.w2, groups) * weight_R1).to(x_RD.dtype)


def test_kept_bytes_per_row_at_a_qwen_shape() -> None:
    """64 experts, model 768, hidden 256: a row's input, gate, up and weight are saved, 40 % less than usual."""
    made = Experts(Model(num_experts=64, dim=768, expert_hidden=256), MoE(), torch.bfloat16)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    count_e = torch.randint(0, 9, (64,), generator=torch.Generator().manual_seed(0))
    rows = int(count_e.sum())
    x_RD = random(rows, 768, dtype=torch.bfloat16, seed=1)
    weight_R1 = random(rows, 1, dtype=torch.float32, seed=2)
    known = list(made.parameters())
    y_RD, kept = saved_bytes(lambda: made.products(x_RD, weight_R1, count_e), known)
    slack = 64 * 16  # the counts, and where the groups end
    assert 0 <= kept - rows * (2 * (768 + 2 * 256) + 4) <= slack
    z_RD, plain = saved_bytes(lambda: weighted_after(made, x_RD, weight_R1, count_e), known)
    assert kept <= 0.6 * plain, f"{kept} of {plain} bytes"
    tolerances.assert_close(y_RD, z_RD, terms=768 + 256, roundings=STEPS)
