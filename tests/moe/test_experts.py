"""The grouped matrix product against the plain loop, and the gradients of experts that no token visits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import tolerances
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.expert_products import clamped_swiglu
from titanmoe.moe.experts import Experts
from titanmoe.moe.grouped_mm import Groups, can_group, grouped_gradient, grouped_product, loop_product
from titanmoe.ops.device import Hardware, imitate

D, HIDDEN = 16, 24
STEPS = 12
"""Roundings of a forward pass: three products, biases, the activation (a function and five more), the weight."""
COUNTS = {
    "uneven": [5, 1, 9, 3],
    "empty_groups": [0, 7, 0, 4],
    "one_group": [0, 0, 18, 0],
    "no_rows": [0, 0, 0, 0],
    "one_row": [0, 0, 0, 1],
}


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def with_gradients(product: Callable[..., Tensor], counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    x_RD, w_eFD = random(sum(counts), D, dtype=dtype, seed=0), random(len(counts), HIDDEN, D, dtype=dtype, seed=1)
    y_RF = product(x_RD, w_eFD, Groups(torch.tensor(counts)))
    assert y_RF.shape == (sum(counts), HIDDEN) and y_RF.dtype == dtype
    y_RF.backward(random(*y_RF.shape, dtype=dtype, seed=2).detach())
    return [y_RF.detach(), x_RD.grad, w_eFD.grad]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_equals_the_loop(dtype: torch.dtype, counts: list[int]) -> None:
    wants = with_gradients(loop_product, counts, dtype)
    for got, want in zip(with_gradients(grouped_product, counts, dtype), wants, strict=True):
        tolerances.assert_close(got, want, terms=HIDDEN)
    idle = torch.tensor(counts) == 0
    assert torch.equal(wants[2][idle], torch.zeros_like(wants[2][idle]))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_loop_is_one_product_per_row(counts: list[int]) -> None:
    x_RD, w_eFD = random(sum(counts), D, dtype=torch.float64, seed=0), random(4, HIDDEN, D, dtype=torch.float64, seed=1)
    of_R = torch.arange(4).repeat_interleave(torch.tensor(counts))
    want = torch.einsum("rd,rfd->rf", x_RD, w_eFD[of_R])
    torch.testing.assert_close(loop_product(x_RD, w_eFD, Groups(torch.tensor(counts))), want)


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


def experts(kind: str, dtype: torch.dtype, hidden: int = HIDDEN, **switches: Any) -> Experts:
    out = Experts(Model(num_experts=4, dim=D, expert_hidden=hidden, **switches), MoE(grouped_mm=kind), dtype)
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
    y_RD = made.products(x_RD, weight_R1, torch.tensor(counts))
    rows = []
    for r, e in enumerate(torch.arange(4).repeat_interleave(torch.tensor(counts)).tolist()):
        hidden = F.silu(made.w1[e] @ x_RD[r]) * (made.w3[e] @ x_RD[r])
        rows.append(made.w2[e] @ hidden * weight_R1[r])
    inputs = [x_RD, weight_R1, *made.parameters()]
    cotangent = random(sum(counts), D, dtype=dtype, seed=7).detach()
    grads = torch.autograd.grad(y_RD, inputs, cotangent)  # raises if a parameter took no part
    for grad in grads[2:]:
        assert all(torch.equal(grad[e], torch.zeros_like(grad[e])) for e, n in enumerate(counts) if n == 0)
    if rows:
        tolerances.assert_close(y_RD, torch.stack(rows), terms=D + HIDDEN, roundings=STEPS)
        wants = torch.autograd.grad(torch.stack(rows), inputs, cotangent)
        for grad, want in zip(grads, wants, strict=True):
            tolerances.assert_close(grad, want, terms=2 * (D + HIDDEN), roundings=3 * STEPS)


def test_widths_that_cannot_be_grouped_take_the_loop() -> None:
    """22 float32 numbers are not whole 16-byte units: the grouped product would refuse them."""
    made = {kind: experts(kind, torch.float32, hidden=22) for kind in ("auto", "loop")}
    x_RD, weight_R1 = random(9, D, dtype=torch.float32, seed=5), random(9, 1, dtype=torch.float32, seed=6)
    auto, loop = (made[kind].products(x_RD, weight_R1, torch.tensor([2, 0, 6, 1])) for kind in ("auto", "loop"))
    assert torch.equal(auto, loop)


def test_the_loop_asks_for_the_groups_sizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the host waits for them: for all products of a layer, forward and backward."""
    asked, tolist = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: asked.append(self) or tolist(self))
    made = experts("loop", torch.float32)
    x_RD, weight_R1 = random(9, D, dtype=torch.float32, seed=5), random(9, 1, dtype=torch.float32, seed=6)
    made.products(x_RD, weight_R1, torch.tensor([2, 0, 6, 1])).sum().backward()
    assert len(asked) == 1


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_blackwells_gradients_of_empty_groups_are_zeroed(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if torch left them as they were in memory."""
    grouped_mm, counts = torch._grouped_mm, torch.tensor([5, 0, 9, 0])
    idle = (counts == 0).view(-1, 1, 1)
    monkeypatch.setattr(torch, "_grouped_mm", lambda *given, offs: grouped_mm(*given, offs=offs) + 7 * idle)
    grad, h = random(14, D, dtype=torch.bfloat16, seed=0), random(14, HIDDEN, dtype=torch.bfloat16, seed=1)
    with imitate(Hardware("cuda", capability)), torch.no_grad():
        found = grouped_gradient(grad, h, Groups(counts))
    empty = (0.0 if capability == (10, 0) else 7.0) * torch.ones(2, D, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(found[[1, 3]], empty)
    assert (found[[0, 2]] != 0).all()


GPT_OSS = {"expert_linear_bias": True, "expert_activation": "clamped_swiglu"}


def biased_row(made: Experts, e: int, x_D: Tensor) -> Tensor:
    """One token through one expert, by the published formula."""
    gate, up = made.w1[e] @ x_D + made.w1_bias[e], made.w3[e] @ x_D + made.w3_bias[e]
    gate, up = torch.minimum(gate, gate.new_tensor(7.0)), torch.minimum(up, up.new_tensor(7.0))
    up = torch.maximum(up, up.new_tensor(-7.0))
    return made.w2[e] @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + made.w2_bias[e]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kind, dtype", [("loop", torch.float64), ("grouped", torch.float32)])
def test_biases_and_the_clamp_row_by_row(kind: str, dtype: torch.dtype, counts: list[int]) -> None:
    """Inputs so large that gate and up reach every bound of the clamp; idle experts' gradients are exactly zero."""
    made = experts(kind, dtype, **GPT_OSS)
    assert len(list(made.parameters())) == 6
    x_RD, weight_R1 = random(sum(counts), D, dtype=dtype, seed=5), random(sum(counts), 1, dtype=dtype, seed=6)
    x_RD = (x_RD * 6).detach().requires_grad_()
    y_RD = made.products(x_RD, weight_R1, torch.tensor(counts))
    of = torch.arange(4).repeat_interleave(torch.tensor(counts)).tolist()
    inputs = [x_RD, weight_R1, *made.parameters()]
    cotangent = random(sum(counts), D, dtype=dtype, seed=7).detach()
    grads = torch.autograd.grad(y_RD, inputs, cotangent)  # raises if a parameter took no part
    for grad in grads[2:]:
        assert all(torch.equal(grad[e], torch.zeros_like(grad[e])) for e, n in enumerate(counts) if n == 0)
    if not of:
        return
    rows = torch.stack([biased_row(made, e, x) for e, x in zip(of, x_RD, strict=True)]) * weight_R1
    if len(of) > 10:
        up_RF = torch.stack([made.w3[e] @ x for e, x in zip(of, x_RD, strict=True)])
        assert (up_RF > 9).any() and (up_RF < -9).any(), "the clamp is not met"
    tolerances.assert_close(y_RD, rows, terms=D + HIDDEN, roundings=STEPS)
    for grad, want in zip(grads, torch.autograd.grad(rows, inputs, cotangent), strict=True):
        tolerances.assert_close(grad, want, terms=2 * (D + HIDDEN), roundings=3 * STEPS)


def test_the_clamps_bounds_pass_their_gradient_in_every_version_of_torch() -> None:
    gate, up = (torch.tensor(x, requires_grad=True) for x in ([7.0, 7.125, 7.0, 1.0], [7.0, 7.0, 7.125, -7.0]))
    clamped_swiglu(gate, up).sum().backward()
    assert (gate.grad != 0).tolist() == [True, False, True, True]
    assert (up.grad != 0).tolist() == [True, True, False, True]


@pytest.mark.parametrize("switches", [{}, GPT_OSS], ids=["plain", "biases"])
@pytest.mark.parametrize("kind, dtype", [("loop", torch.float64), ("grouped", torch.float32)])
def test_gate_and_up_in_one_product(kind: str, dtype: torch.dtype, switches: dict[str, Any]) -> None:
    made, counts = experts(kind, dtype, **switches), torch.tensor([5, 0, 9, 3])
    x_RD, weight_R1 = random(17, D, dtype=dtype, seed=5), random(17, 1, dtype=dtype, seed=6)
    cotangent = random(17, D, dtype=dtype, seed=7).detach()
    others = [p for name, p in made.named_parameters() if name not in ("w1", "w3")]
    y_RD = made.products(x_RD, weight_R1, counts)
    want = [y_RD, *torch.autograd.grad(y_RD, [x_RD, weight_R1, made.w1, made.w3, *others], cotangent)]
    made.w1_and_w3 = torch.nn.Parameter(torch.cat((made.w1, made.w3), 1).detach())
    y_RD = made.products(x_RD, weight_R1, counts)
    x, weight, both, *rest = torch.autograd.grad(y_RD, [x_RD, weight_R1, made.w1_and_w3, *others], cotangent)
    for a, b in zip([y_RD, x, weight, *both.chunk(2, 1), *rest], want, strict=True):
        tolerances.assert_close(a, b, terms=2 * HIDDEN, roundings=STEPS)


def test_the_etp_ranks_of_a_biased_expert_add_up() -> None:
    """Each has a part of the hidden width and adds the last bias to its own columns."""
    whole = experts("loop", torch.float64, **GPT_OSS)
    x_RD, weight_R1 = random(18, D, dtype=torch.float64, seed=5), random(18, 1, dtype=torch.float64, seed=6)
    counts, total = torch.tensor([0, 7, 0, 11]), torch.zeros(18, D, dtype=torch.float64)
    for rank in range(2):
        part = experts("loop", torch.float64, HIDDEN // 2, **GPT_OSS)
        part.etp_rank = rank
        for name, cut in {"w1": 1, "w3": 1, "w2": 2, "w1_bias": 1, "w3_bias": 1, "w2_bias": 1}.items():
            setattr(part, name, torch.nn.Parameter(getattr(whole, name).detach().chunk(2, cut)[rank]))
        total = total + part.products(x_RD, weight_R1, counts)
    torch.testing.assert_close(total, whole.products(x_RD, weight_R1, counts), rtol=1e-12, atol=1e-12)


def test_the_rows_of_padded_bins_give_biases_no_gradient() -> None:
    """A padded row is a zero token with weight 0, and its gradient is zero."""
    made = experts("loop", torch.float64, **GPT_OSS)
    x_RD, weight_R1 = (random(9, n, dtype=torch.float64, seed=n).detach() for n in (D, 1))
    cotangent = random(9, D, dtype=torch.float64, seed=7).detach()
    kept = torch.tensor([0, 1, 2, 5, 6])  # of bins of 3 rows
    parameters = list(made.parameters())
    want = torch.autograd.grad(
        made.products(x_RD[kept], weight_R1[kept], torch.tensor([3, 2, 0, 0])), parameters, cotangent[kept]
    )
    padding = torch.ones(9, 1, dtype=torch.float64).index_fill(0, kept, 0)
    padded = (x * (1 - padding) for x in (x_RD, weight_R1, cotangent))
    x_RD, weight_R1, cotangent = padded
    bins = torch.tensor([3, 4, 2, 0])  # rows 3, 4 before and 7, 8 after the second expert's are empty
    got = torch.autograd.grad(made.products(x_RD, weight_R1, bins), parameters, cotangent)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
