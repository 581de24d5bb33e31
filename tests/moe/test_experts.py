"""The grouped matrix product against the plain loop, and the gradients of experts that nobody visits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.config.schema import Model, MoE
from titanmoe.moe.experts import Experts, Product, can_group, grouped_loop, grouped_product

D, HIDDEN = 16, 24
COUNTS = {
    "uneven": [5, 1, 9, 3],
    "empty_groups": [0, 7, 0, 4],
    "one_group": [0, 0, 18, 0],
    "no_rows": [0, 0, 0, 0],
    "one_row": [0, 0, 0, 1],
}


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def with_gradients(product: Product, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    x_RD, w_eFD = random(sum(counts), D, dtype=dtype, seed=0), random(len(counts), HIDDEN, D, dtype=dtype, seed=1)
    y_RF = product(x_RD, w_eFD, torch.tensor(counts))
    assert y_RF.shape == (sum(counts), HIDDEN) and y_RF.dtype == dtype
    y_RF.backward(random(*y_RF.shape, dtype=dtype, seed=2).detach())
    return [y_RF.detach(), x_RD.grad, w_eFD.grad]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_equals_the_loop(dtype: torch.dtype, counts: list[int]) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    wants = with_gradients(grouped_loop, counts, dtype)
    for got, want in zip(with_gradients(grouped_product, counts, dtype), wants, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    idle = torch.tensor(counts) == 0
    assert torch.equal(wants[2][idle], torch.zeros_like(wants[2][idle]))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_loop_is_one_product_per_row(counts: list[int]) -> None:
    x_RD, w_eFD = random(sum(counts), D, dtype=torch.float64, seed=0), random(4, HIDDEN, D, dtype=torch.float64, seed=1)
    of_R = torch.arange(4).repeat_interleave(torch.tensor(counts))
    want = torch.einsum("rd,rfd->rf", x_RD, w_eFD[of_R])
    torch.testing.assert_close(grouped_loop(x_RD, w_eFD, torch.tensor(counts)), want)


@pytest.mark.parametrize(
    "dtype, widths, can",
    [
        (torch.float32, (4, 8), True),
        (torch.float32, (4, 6), False),
        (torch.float32, (2, 4), False),
        (torch.bfloat16, (8, 16), True),
        (torch.bfloat16, (8, 12), False),
        (torch.float64, (16, 16), False),
    ],
)
def test_the_grouped_product_takes_whole_16_byte_units_and_no_float64(
    dtype: torch.dtype, widths: tuple[int, ...], can: bool
) -> None:
    assert can_group(torch.empty(1, widths[0], dtype=dtype), *widths) == can


def experts(kind: str, dtype: torch.dtype, hidden: int = HIDDEN) -> Experts:
    out = Experts(Model(num_experts=4, dim=D, expert_hidden=hidden), MoE(grouped_mm=kind), dtype)
    for seed, weight in enumerate(out.parameters()):
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return out


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kind, dtype", [("loop", torch.float64), ("loop", torch.float32), ("grouped", torch.float32)])
def test_experts_are_weighted_swiglus_and_idle_ones_have_zero_gradients(
    kind: str, dtype: torch.dtype, counts: list[int]
) -> None:
    made = experts(kind, dtype)
    x_RD, weight_R1 = random(sum(counts), D, dtype=dtype, seed=5), random(sum(counts), 1, dtype=dtype, seed=6)
    y_RD = made(x_RD, weight_R1, torch.tensor(counts))
    rows = []
    for r, e in enumerate(torch.arange(4).repeat_interleave(torch.tensor(counts)).tolist()):
        hidden = F.silu(made.w1[e] @ x_RD[r]) * (made.w3[e] @ x_RD[r])
        rows.append(made.w2[e] @ hidden * weight_R1[r])
    inputs = [x_RD, weight_R1, *made.parameters()]
    cotangent = random(sum(counts), D, dtype=dtype, seed=7).detach()
    grads = torch.autograd.grad(y_RD, inputs, cotangent)  # raises where a parameter took no part
    for grad in grads[2:]:
        assert all(torch.equal(grad[e], torch.zeros_like(grad[e])) for e, n in enumerate(counts) if n == 0)
    if rows:
        torch.testing.assert_close(y_RD, torch.stack(rows), rtol=1e-4, atol=1e-5)
        wants = torch.autograd.grad(torch.stack(rows), inputs, cotangent)
        for grad, want in zip(grads, wants, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-4)


def test_widths_that_cannot_be_grouped_take_the_loop() -> None:
    """22 float32 are no whole 16-byte units: the grouped product would refuse them."""
    made = {kind: experts(kind, torch.float32, hidden=22) for kind in ("auto", "loop")}
    x_RD, weight_R1 = random(9, D, dtype=torch.float32, seed=5), random(9, 1, dtype=torch.float32, seed=6)
    auto, loop = (made[kind](x_RD, weight_R1, torch.tensor([2, 0, 6, 1])) for kind in ("auto", "loop"))
    assert torch.equal(auto, loop)
