"""Products in 8 bits: the roundings by their definition, the gradients by the formula, and weights rounded once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import parity, world
from tests.moe.test_experts import COUNTS, GPT_OSS, STEPS, random
from tests.support import tolerances
from titanmoe.config.schema import Model, MoE
from titanmoe.moe import fp8
from titanmoe.moe.expert_products import plain_swiglu
from titanmoe.moe.experts import Experts
from titanmoe.moe.fp8 import LARGEST, EightBitProducts, quantise
from titanmoe.moe.grouped_mm import Groups

D, HIDDEN = 16, 32
# Every number that e4m3 has: 3 bits of fraction, exponents -6 to 8, subnormals of 2^-9; all ones is NaN.
E4M3 = sorted(
    {(1 + f / 8) * 2.0**e for e in range(-6, 9) for f in range(8)} - {480.0} | {f * 2.0**-9 for f in range(8)}
)


def nearest(value: float) -> float:
    """The nearest e4m3 number; of two the one with an even fraction, which has an even index in the list."""
    place = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - abs(value)), i % 2))
    return E4M3[place] if value >= 0 else -E4M3[place]


def rounded(x: Tensor) -> Tensor:
    """The values that a tensor represents after its rows are quantised."""
    q, scale, _ = quantise(x)
    return q.float() * scale.unsqueeze(-1)


def test_rows_are_rounded_to_e4m3_under_their_own_scale() -> None:
    x = torch.randn(7, D, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e6
    x[2] *= 1e-6
    x[3] = 0
    x[4, 3:] = 0
    x[5] = torch.logspace(-4, 0, D)
    q, scale, _ = quantise(x)
    assert quantise(x.t())[0].is_contiguous(), "the hardware's product takes nothing else"
    for row in range(len(x)):
        largest = float(x[row].abs().max())
        if not largest:
            assert (q[row].float() == 0).all()
            continue
        assert float(scale[row]) == pytest.approx(largest / LARGEST)
        want = [nearest(float(v)) for v in (x[row] / scale[row]).clamp(-LARGEST, LARGEST)]
        assert q[row].float().tolist() == want
        assert float((rounded(x)[row] - x[row]).abs().max()) <= largest / 16


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_and_gradients_are_those_of_the_formula(counts: list[int]) -> None:
    """Forward and dx use rounded factors, dw the original ones."""
    x, of = random(sum(counts), D, dtype=torch.float32, seed=0), torch.arange(4).repeat_interleave(torch.tensor(counts))
    weights = [random(4, HIDDEN, D, dtype=torch.float32, seed=s) for s in (1, 2)]
    outputs = EightBitProducts(groups=Groups(torch.tensor(counts)), method="loop", emulated=True).up(x, *weights)
    cotangents = [random(sum(counts), HIDDEN, dtype=torch.float32, seed=s).detach() for s in (3, 4)]
    got = torch.autograd.grad(outputs, (x, *weights), cotangents)
    grad_x = torch.zeros_like(x)
    for y, w, g, grad_w in zip(outputs, weights, cotangents, got[1:], strict=True):
        w_RFD, back_RDF = rounded(w.detach())[of], rounded(w.detach().transpose(1, 2))[of]
        tolerances.assert_close(y, torch.einsum("rd,rfd->rf", rounded(x.detach()), w_RFD), terms=D, roundings=4)
        grad_x += torch.einsum("rf,rdf->rd", rounded(g), back_RDF)
        want = torch.zeros_like(w).index_add(0, of, torch.einsum("rf,rd->rfd", g, x.detach()))
        tolerances.assert_close(grad_w, want, terms=sum(counts))
    tolerances.assert_close(got[0], grad_x, terms=2 * HIDDEN, roundings=8)


@pytest.mark.parametrize("switches", [{}, GPT_OSS], ids=["swiglu", "gpt_oss"])
def test_experts_are_near_those_of_the_compute_dtype_and_not_the_same(switches: dict) -> None:
    made = {}
    for dtype in ("compute", "fp8_emulated"):
        made[dtype] = Experts(
            Model(num_experts=4, dim=D, expert_hidden=HIDDEN, **switches), MoE(expert_dtype=dtype), torch.float32
        )
        for seed, weight in enumerate(made[dtype].parameters()):
            torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    results = []
    for experts in made.values():
        x, weight = random(18, D, dtype=torch.float32, seed=5), random(18, 1, dtype=torch.float32, seed=6)
        y = experts.products(x, weight, torch.tensor([5, 0, 9, 4]))
        cotangent = random(18, D, dtype=torch.float32, seed=7).detach()
        results.append([y, *torch.autograd.grad(y, [x, weight, *experts.parameters()], cotangent)])
    for want, got in zip(*results, strict=True):
        error = float(((got - want).norm() / want.norm()).detach())
        assert error < 0.1
    assert not torch.equal(results[0][0], results[1][0])
    for grad in results[1][3:6]:
        assert torch.equal(grad[1], torch.zeros_like(grad[1])), "an expert without rows"


def test_the_down_product_is_of_the_rounded_activation() -> None:
    experts = Experts(
        Model(num_experts=4, dim=D, expert_hidden=HIDDEN), MoE(expert_dtype="fp8_emulated"), torch.float32
    )
    for seed, weight in enumerate(experts.parameters()):
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    x, weight = random(6, D, dtype=torch.float32, seed=5).detach(), random(6, 1, dtype=torch.float32, seed=6).detach()
    y = experts.products(x, weight, torch.tensor([0, 6, 0, 0]))
    gate, up = (rounded(x) @ rounded(w.detach())[1].t() for w in (experts.w1, experts.w3))
    want = rounded(plain_swiglu(gate, up, weight, False)) @ rounded(experts.w2.detach())[1].t()
    tolerances.assert_close(y, want, terms=D + HIDDEN, roundings=STEPS + 8)


def steps(keep: bool) -> tuple[list[float], list[float], int]:
    """Losses and norms of two steps of two microbatches, and how often a weight was rounded."""
    eight = dict.fromkeys(parity.NUMERICS, "float32") | {
        "moe.expert_dtype": "fp8_emulated",
        "training.global_batch_size": 2,
    }
    trainer = parity.make_trainer(eight, loader=parity.samples())
    layers = trainer.training.moe_layers.values()
    assert all(moe.experts.rounded.keep for moe in layers), "no rank shares these weights, so they stay as they are"
    for moe in layers:
        moe.experts.rounded.keep = keep
    rounded = []
    with mock.patch.object(fp8, "quantise", lambda x, kernels: rounded.append(x) or quantise(x, kernels)):
        reports = [trainer.train_step() for _ in range(2)]
    weights = [x for x in rounded if x.dim() == 3]
    return [r["loss"] for r in reports], [r["grad_norm"] for r in reports], len(weights)


def test_weights_are_rounded_once_a_step_where_they_stay() -> None:
    """2 layers, 3 weights of 2 widths, 2 steps; twice as often where each of the 2 microbatches rounds them."""
    (kept,), (again,) = (world.run(1, steps, keep) for keep in (True, False))
    assert kept[:2] == again[:2]
    assert (kept[2], again[2]) == (24, 48)
